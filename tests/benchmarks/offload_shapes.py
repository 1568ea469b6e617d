"""Transformers of real size with random weights, and seeded inputs for one denoise step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """One model to stream.

    Attributes:
        model_class: In diffusers.
        config: What differs from the class's default.
        inputs: Makes the arguments of one step for so many tokens, on a device.
        latents: The argument that the step's first result is subtracted from.
    """

    model_class: str
    config: dict[str, Any]
    inputs: Callable[[int, str, dict[str, Any]], dict[str, Any]]
    latents: str = "hidden_states"

    def make(self, directory: Path, device: str) -> None:
        """Write random bfloat16 weights, unless they are there."""
        if (directory / "config.json").exists():
            return
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = self.load_class()(**self.config)
        finally:
            torch.set_default_dtype(before)
        model.save_pretrained(directory, max_shard_size="5GB")

    def load_class(self) -> Any:
        """The class; imports diffusers."""
        import diffusers

        return getattr(diffusers, self.model_class)

    def step_inputs(self, directory: Path, tokens: int, device: str) -> dict[str, Any]:
        """Arguments of one step for the model in a directory."""
        return self.inputs(tokens, device, json.loads((directory / "config.json").read_text()))


def _noise(device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    return noise


def flux_inputs(tokens: int, device: str, config: dict[str, Any]) -> dict[str, Any]:
    """A square picture of `tokens` patches and a prompt of 512 tokens."""
    side, noise = int(tokens**0.5), _noise(device)
    ids = torch.zeros(side * side, 3, device=device)
    ids[:, 1] = torch.arange(side, device=device).repeat_interleave(side)
    ids[:, 2] = torch.arange(side, device=device).repeat(side)
    return {
        "hidden_states": noise(1, side * side, config["in_channels"]),
        "encoder_hidden_states": noise(1, 512, config["joint_attention_dim"]),
        "pooled_projections": noise(1, config["pooled_projection_dim"]),
        "timestep": torch.ones(1, device=device, dtype=torch.bfloat16),
        "img_ids": ids,
        "txt_ids": torch.zeros(512, 3, device=device),
        "return_dict": False,
    }


def ltx2_inputs(tokens: int, device: str, config: dict[str, Any]) -> dict[str, Any]:
    """A video of `tokens` patches in four latent frames, sound of a sixteenth as many."""
    side, noise = int((tokens // 4) ** 0.5), _noise(device)
    tokens, sound = 4 * side * side, max(1, tokens // 16)
    return {
        "hidden_states": noise(1, tokens, config["in_channels"]),
        "audio_hidden_states": noise(1, sound, config["audio_in_channels"]),
        "encoder_hidden_states": noise(1, 256, config["caption_channels"]),
        "audio_encoder_hidden_states": noise(1, 256, config["caption_channels"]),
        "timestep": torch.ones(1, tokens, device=device, dtype=torch.bfloat16),
        "audio_timestep": torch.ones(1, sound, device=device, dtype=torch.bfloat16),
        "num_frames": 4,
        "height": side,
        "width": side,
        "audio_num_frames": sound,
        "return_dict": False,
    }


SHAPES = {
    # 12 B parameters, 22.15 GiB
    "flux": Shape("FluxTransformer2DModel", {"guidance_embeds": False}, flux_inputs),
    # Two towers, for pictures and sound; 30.0 GiB
    "ltx2": Shape("LTX2VideoTransformer3DModel", {"num_layers": 41}, ltx2_inputs),
}

"""What a row's artifacts take on disk where no earlier run says so; from configurations alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flows.batch.rows import Work
from stages.errors import ModelError
from stages.models import ModelDirectory
from stages.size_rules import temporal_multiple, vae_scale

ASSUMED_TOKENS = 512
ASSUMED_WIDTH = 4096
VIDEO_BYTES_PER_PIXEL = 0.1
"""Of a finished video, per pixel and frame."""

ITEM_BYTES = 4


def estimated_nbytes(stage: str, work: Work, model: ModelDirectory, max_tokens: int | None) -> int:
    """Bytes of one row's artifact of a stage, at most.

    Args:
        max_tokens: Of a prompt; None where the family has no such argument.
    """
    if stage == "encode":
        passes = 2 if work.is_guided else 1
        return passes * (max_tokens or ASSUMED_TOKENS) * _width(model) * ITEM_BYTES
    if stage == "denoise":
        return _latents(work, model) * ITEM_BYTES
    pixels = work.height * work.width * work.num_frames
    if work.num_frames > 1:
        return round(VIDEO_BYTES_PER_PIXEL * pixels)
    return 3 * pixels


def _width(model: ModelDirectory) -> int:
    """Numbers per token: the hidden sizes of all text encoders together."""
    found = [
        size
        for name, part in model.components.items()
        if name.startswith("text_encoder")
        for size in [_hidden_size(part.config())]
        if size
    ]
    return sum(found) or ASSUMED_WIDTH


def _hidden_size(config: Mapping[str, Any]) -> int:
    for place in _places(config):
        for name in ("hidden_size", "d_model"):
            if isinstance(size := place.get(name), int):
                return size
    return 0


def _places(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    if isinstance(inner := config.get("text_config"), Mapping):
        yield inner


def _latents(work: Work, model: ModelDirectory) -> int:
    """Numbers of a row's latents."""
    vae = model.components["vae"].config()
    try:
        scale = vae_scale(vae)
        frames = 1 if work.num_frames == 1 else (work.num_frames - 1) // temporal_multiple(vae) + 1
    except ModelError:
        scale, frames = 8, work.num_frames
    channels = next(
        (n for name in ("latent_channels", "z_dim") if isinstance(n := vae.get(name), int)), 16
    )
    return channels * frames * (work.height // scale) * (work.width // scale)

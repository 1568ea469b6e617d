"""Many pictures at once by the batched forward: how training watches its own progress.

Same steps as `ZImagePipeline`; the figures that ship are measured through that pipeline instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from stages.miniature.forward import PAD_MULTIPLE, Forward
from stages.miniature.tokenizer import wrap


@torch.no_grad()
def sample(
    pipeline: Any,
    captions: Sequence[str],
    *,
    num_inference_steps: int,
    guidance_scale: float = 0.0,
    seed: int = 0,
) -> list[Image.Image]:
    """One picture for each caption, on the device of the pipeline's components.

    `guidance_scale` counts as `ZImagePipeline` counts it: 0 is none.
    """
    device = pipeline.transformer.device
    forward = Forward(pipeline.text_encoder, pipeline.transformer)
    generator = torch.Generator("cpu").manual_seed(seed)
    side = pipeline.vae.config.sample_size // 8
    noise = torch.randn(
        len(captions), pipeline.transformer.in_channels, side, side, generator=generator
    )
    tokens = [pipeline.tokenizer(wrap(caption)).input_ids for caption in captions]
    padded = [-(-len(ids) // PAD_MULTIPLE) * PAD_MULTIPLE for ids in tokens]
    pictures: dict[int, Image.Image] = {}
    for length in sorted(set(padded)):
        chosen = [i for i, value in enumerate(padded) if value == length]
        latents = noise[chosen].to(device)
        conditions = [_features(forward, [tokens[i] for i in chosen], length, device)]
        if guidance_scale > 0:
            empty = pipeline.tokenizer(wrap("")).input_ids
            conditions.append(_features(forward, [empty] * len(chosen), PAD_MULTIPLE, device))
        latents = _denoise(
            pipeline, forward, latents, conditions, num_inference_steps, guidance_scale
        )
        for i, picture in zip(chosen, decode(pipeline.vae, latents), strict=True):
            pictures[i] = picture
    return [pictures[i] for i in range(len(captions))]


@torch.no_grad()
def decode(vae: Any, latents: Tensor, *, batch_size: int = 128) -> list[Image.Image]:
    """Pictures of scaled latents `(N, C, 16, 16)`."""
    pictures = []
    for part in torch.split(latents, batch_size):
        pixels = vae.decode(part / vae.config.scaling_factor + vae.config.shift_factor).sample
        levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
        pictures += [Image.fromarray(item) for item in levels.cpu().numpy()]
    return pictures


def _features(
    forward: Forward, tokens: list[list[int]], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(tokens), length, dtype=torch.long)
    for row, item in zip(ids, tokens, strict=True):
        row[: len(item)] = torch.tensor(item)
    lengths = torch.tensor([len(item) for item in tokens], device=device)
    return forward.encode(ids.to(device)), lengths


def _denoise(
    pipeline: Any,
    forward: Forward,
    latents: Tensor,
    conditions: list[tuple[Tensor, Tensor]],
    num_inference_steps: int,
    guidance_scale: float,
) -> Tensor:
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(
        sigmas=torch.linspace(1, 1 / num_inference_steps, num_inference_steps).tolist()
    )
    for moment in scheduler.timesteps:
        time = ((1000 - moment) / 1000).expand(len(latents)).to(latents.device)
        outputs = [forward.predict(latents, time, *condition) for condition in conditions]
        velocity = outputs[0]
        if len(outputs) == 2:
            velocity = velocity + guidance_scale * (outputs[0] - outputs[1])
        latents = scheduler.step(-velocity, moment, latents, return_dict=False)[0]
    return latents

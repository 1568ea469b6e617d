"""Colours for previews: a linear fit from a VAE's latents to the pixels that they stand for.

`python -m stages.latent_rgb MODEL` fits a model's VAE, on the CPU and without pictures of yours,
and prints the line for its `exeunt.json`. Takes seconds for a small VAE, a minute for a large one.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch.nn import functional

from stages.errors import ModelError
from stages.models import open_model, resolve_model

DIGITS = 4


def fit(vae: Any, pictures: torch.Tensor | None = None) -> list[list[float]]:
    """Rows of three for each channel and one for the constant: scaled latents to RGB, -1 to 1.

    Args:
        vae: An autoencoder of diffusers, for pictures or for videos.
        pictures: What it is tried with, `(N, 3, H, W)` from -1 to 1; by default pictures of no
            subject. Those of a model's own kind fit it better.
    """
    if pictures is None:
        pictures = coloured_pictures(32, 128, seed=0)
    latents = torch.cat([_encoded(vae, each.unsqueeze(0)) for each in pictures])
    seen = functional.interpolate(pictures, size=latents.shape[-2:], mode="area")
    channels = latents.movedim(1, -1).reshape(-1, latents.shape[1])
    constant = torch.ones(len(channels), 1)
    rows = torch.linalg.lstsq(
        torch.cat([channels, constant], dim=1), seen.movedim(1, -1).reshape(-1, 3)
    ).solution
    return [[round(float(value), DIGITS) for value in row] for row in rows]


def coloured_pictures(count: int, edge: int, seed: int) -> torch.Tensor:
    """Pictures `(count, 3, edge, edge)` from -1 to 1: discs on plain grounds, and soft colours."""
    drawn = torch.Generator().manual_seed(seed)
    places = torch.arange(edge) / edge
    made = []
    for number in range(count):
        if number % 4 == 3:
            coarse = torch.rand(1, 3, 4, 4, generator=drawn) * 2 - 1
            soft = functional.interpolate(coarse, size=(edge, edge), mode="bicubic")
            made.append(soft[0].clamp(-1, 1))
            continue
        picture = _colour(drawn).expand(3, edge, edge)
        for _ in range(4):
            x, y, radius = torch.rand(3, generator=drawn).tolist()
            inside = (places[None] - x) ** 2 + (places[:, None] - y) ** 2 < (0.3 * radius) ** 2
            picture = torch.where(inside, _colour(drawn), picture)
        made.append(picture)
    return torch.stack(made)


def _colour(drawn: torch.Generator) -> torch.Tensor:
    return torch.rand(3, 1, 1, generator=drawn).mul(2).sub(1).mul(1.3).clamp(-1, 1)


@torch.no_grad()
def _encoded(vae: Any, picture: torch.Tensor) -> torch.Tensor:
    """One picture's latents `(1, C, H, W)`, scaled as a denoiser has them."""
    is_video = getattr(vae, "encoder", None) is not None and _takes_frames(vae)
    given = picture.unsqueeze(2) if is_video else picture
    latents: torch.Tensor = vae.encode(given).latent_dist.mode()
    latents = latents[:, :, 0] if is_video else latents
    config = vae.config
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        mean, std = (torch.tensor(config[name]) for name in ("latents_mean", "latents_std"))
        return (latents - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
    shift = float(config.get("shift_factor") or 0.0)
    scale = float(config.get("scaling_factor") or 1.0)
    return (latents - shift) * scale


def _takes_frames(vae: Any) -> bool:
    return any(isinstance(module, torch.nn.Conv3d) for module in vae.encoder.modules())


def main() -> None:
    """Fit a model's VAE and print the entry."""
    import diffusers

    parser = argparse.ArgumentParser(prog="python -m stages.latent_rgb", description=__doc__)
    parser.add_argument("model", help="a model directory, or miniature")
    name = parser.parse_args().model
    try:
        vae = open_model(resolve_model(name)).components.get("vae")
    except ModelError as error:
        parser.error(str(error))
    if vae is None or not vae.class_name.startswith("AutoencoderKL"):
        found = "no VAE" if vae is None else f"a {vae.class_name}"
        parser.error(f"model {name} has {found}; a fit takes an AutoencoderKL")
    kind = getattr(diffusers, vae.class_name)
    loaded = kind.from_pretrained(vae.directory, variant=vae.variant, torch_dtype=torch.float32)
    print(json.dumps({"latent_rgb": fit(loaded.eval())}))


if __name__ == "__main__":
    main()

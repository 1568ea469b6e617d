"""Training of the miniature's autoencoder on drawn scenes, and its latents' scale."""

import logging
import math
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from stages.miniature.data import Corpus
from stages.miniature.draw import render

_log = logging.getLogger(__name__)

KL_WEIGHT = 1e-2
"""Of the mean over latent elements, beside a mean absolute error over pixels in -1..1."""

_LEARNING_RATE = 2e-3
_LOG_EVERY = 200
_NUM_MEASURED = 4096
_WARM_UP = 0.02  # share of the run


def train_vae(
    vae: Any,
    corpus: Corpus,
    *,
    minutes: float,
    batch_size: int,
    seed: int,
    kl_weight: float = KL_WEIGHT,
) -> None:
    """Train for so many minutes, then set the config's shift and scaling from a few
    thousand latents.

    The learning rate follows the clock, so a slower machine trains less, not longer.
    """
    device = vae.device
    _fit(vae, corpus, minutes=minutes, batch_size=batch_size, seed=seed, kl_weight=kl_weight)
    latents = encode(
        vae, *(part[:_NUM_MEASURED].to(device) for part in (corpus.figures, corpus.backgrounds))
    )
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(scale, 4))
    spread = latents.std(dim=(0, 2, 3)).tolist()
    _log.info("latents: shift %.4f, scale %.4f, spread by channel %s", shift, scale, spread)


def _fit(
    vae: Any, corpus: Corpus, *, minutes: float, batch_size: int, seed: int, kl_weight: float
) -> None:
    device = vae.device
    torch.manual_seed(seed)
    figures, backgrounds = corpus.figures.to(device), corpus.backgrounds.to(device)
    vae.train()
    if device.type == "cuda":
        vae.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4
    )
    start, step, errors = time.monotonic(), 0, torch.zeros(2, device=device)
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        rate = _LEARNING_RATE * min(1, done / _WARM_UP + 1e-2) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(figures), (batch_size,), device=device)
        pictures = render(figures[chosen], backgrounds[chosen]) * 2 - 1
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(pictures).latent_dist
            painted = vae.decode(posterior.sample()).sample
        error = F.l1_loss(painted.float(), pictures)
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        (error + kl_weight * kl).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        errors += torch.stack([error.detach(), kl.detach().float()])
        step += 1
        if step % _LOG_EVERY == 0:
            mean, kl_mean = (errors / _LOG_EVERY).tolist()
            _log.info("vae step %d: error %.4f, kl %.3f, %.0f %%", step, mean, kl_mean, 100 * done)
            errors.zero_()
    vae.to(memory_format=torch.contiguous_format).eval()


@torch.no_grad()
def encode(vae: Any, figures: Tensor, backgrounds: Tensor, *, batch_size: int = 512) -> Tensor:
    """Unscaled latents `(N, C, 16, 16)` float32 of packed placements: the posterior's means."""
    parts = []
    for some, grounds in zip(
        torch.split(figures, batch_size), torch.split(backgrounds, batch_size), strict=True
    ):
        with torch.autocast(
            vae.device.type, dtype=torch.bfloat16, enabled=vae.device.type == "cuda"
        ):
            parts.append(vae.encode(render(some, grounds) * 2 - 1).latent_dist.mean.float())
    return torch.cat(parts)

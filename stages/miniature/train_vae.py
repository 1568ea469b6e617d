"""Training of the miniature's autoencoder on drawn scenes, and its latents' scale."""

import logging
import math
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from stages.miniature.data import Corpus
from stages.miniature.draw import render
from stages.miniature.optim import CapturedStep
from stages.miniature.recipe import IMAGE_SIZE_PX

_log = logging.getLogger(__name__)

KL_WEIGHT = 1e-3
"""Of the mean over latent elements, beside a mean absolute error over pixels in -1..1."""

_LOG_EVERY = 500
_NUM_MEASURED = 1024
_WARM_UP = 0.02  # share of the run in which the learning rate rises
_CROP_PX, _CROP_SHARE = 64, 0.75
_KL_WARM_UP = 0.3  # and the weight of the KL: a decoder that sees nothing yet must not lose to it


def train_vae(
    vae: Any,
    corpus: Corpus,
    *,
    minutes: float,
    batch_size: int,
    seed: int,
    kl_weight: float = KL_WEIGHT,
    learning_rate: float = 2e-3,
) -> None:
    """Train for so many minutes, then set the config's shift and scaling from its latents.

    The learning rate follows the clock, so a slower machine trains less, not longer. The first
    three quarters see squares of 64 pixels about a figure, which cost a quarter; the rest sees
    whole pictures, since norms and attention span all that they see.
    """
    device = vae.device
    torch.manual_seed(seed)
    vae.train()
    trainer = _VaeTrainer(vae, corpus, batch_size=batch_size)
    start, reported = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        fall = (1 + math.cos(math.pi * done)) / 2
        trainer.rate.fill_(learning_rate * min(1, done / _WARM_UP + 1e-2) * fall)
        trainer.kl_weight.fill_(kl_weight * min(1, done / _KL_WARM_UP))
        for _ in range(10):
            step = trainer.crop_step if done < _CROP_SHARE else trainer.whole_step
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock counts work done, not work queued
        if trainer.num_steps - reported >= _LOG_EVERY:
            error, kl = (trainer.sums / (trainer.num_steps - reported)).tolist()
            reported = trainer.num_steps
            trainer.sums.zero_()
            _log.info("vae step %d, %.0f %%: error %.4f, kl %.3f", reported, 100 * done, error, kl)
    vae.eval()
    latents = encode(
        vae, *(part[:_NUM_MEASURED].to(device) for part in (corpus.figures, corpus.backgrounds))
    )
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(scale, 4))
    spread = [round(value, 2) for value in latents.std(dim=(0, 2, 3)).tolist()]
    _log.info("latents: shift %.4f, scale %.4f, spread by channel %s", shift, scale, spread)


class _VaeTrainer:
    """One step of training: draw, encode, sample, decode, update."""

    def __init__(self, vae: Any, corpus: Corpus, *, batch_size: int) -> None:
        device = vae.device
        self._vae, self._batch_size, self._device = vae, batch_size, device
        self._figures, self._backgrounds = corpus.figures.to(device), corpus.backgrounds.to(device)
        self.rate, self.kl_weight = torch.zeros((), device=device), torch.zeros((), device=device)
        self.sums = torch.zeros(2, device=device)
        self._optimizer = torch.optim.AdamW(
            vae.parameters(),
            lr=self.rate,
            betas=(0.9, 0.99),
            weight_decay=1e-4,
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )
        self.crop_step = CapturedStep(partial(self._update, _CROP_PX), device=device)
        self.whole_step = CapturedStep(partial(self._update, IMAGE_SIZE_PX), device=device)

    @property
    def num_steps(self) -> int:
        return self.crop_step.num_calls + self.whole_step.num_calls

    def _update(self, size_px: int) -> None:
        chosen = torch.randint(len(self._figures), (self._batch_size,), device=self._device)
        figures = self._figures[chosen]
        if size_px < IMAGE_SIZE_PX:
            figures = _move_crop(figures, size_px)
        pictures = render(figures, self._backgrounds[chosen], size_px=size_px) * 2 - 1
        with torch.autocast(
            self._device.type,
            dtype=torch.bfloat16,
            enabled=self._device.type == "cuda",
            cache_enabled=False,
        ):
            posterior = self._vae.encode(pictures).latent_dist
            painted = self._vae.decode(posterior.sample()).sample
        error = F.l1_loss(painted.float(), pictures)
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(error + self.kl_weight * kl)
        nn.utils.clip_grad_norm_(self._vae.parameters(), 1.0)
        self._optimizer.step()
        self.sums += torch.stack([error.detach(), kl.detach()])


def _move_crop(figures: Tensor, size_px: int) -> Tensor:
    """Packed figures moved so that the top left square holds one figure's centre or its edge."""
    num = len(figures)
    second = (figures[:, 1, 0] >= 0) & (torch.rand(num, device=figures.device) < 0.5)
    centre = torch.where(second[:, None], figures[:, 1, 2:4], figures[:, 0, 2:4])
    wander = (torch.rand(num, 2, device=figures.device) - 0.5) * (size_px - 8)
    corner = (centre - size_px / 2 + wander).clamp(0, IMAGE_SIZE_PX - size_px)
    moved = figures.clone()
    moved[:, :, 2:4] -= corner[:, None]
    return moved


@torch.no_grad()
def encode(vae: Any, figures: Tensor, backgrounds: Tensor, *, batch_size: int = 512) -> Tensor:
    """Unscaled latents `(N, C, 16, 16)` float32 of packed placements: the posterior's means."""
    parts = []
    device = vae.device.type
    for some, grounds in zip(
        torch.split(figures, batch_size), torch.split(backgrounds, batch_size), strict=True
    ):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            parts.append(vae.encode(render(some, grounds) * 2 - 1).latent_dist.mean.float())
    return torch.cat(parts)

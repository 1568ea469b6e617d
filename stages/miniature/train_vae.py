"""Training of the miniature's autoencoder on drawn scenes, and its latents' scale."""

import copy
import logging
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from stages.miniature.data import Corpus
from stages.miniature.draw import render
from stages.miniature.optim import CapturedStep

_log = logging.getLogger(__name__)

KL_WEIGHT = 1e-3
"""Of the mean over latent elements, beside the error of a pixel's values in -1..1."""

_LOG_EVERY = 400
_NUM_MEASURED = 2048
_WARM_UP_STEPS = 200
_LAST_RATE = 0.01  # share of the learning rate left at the end
_KL_WARM_UP = 0.3  # and the weight of the KL: a decoder that sees nothing yet must not lose to it
_EMA_DECAY = 0.998
_FIGURE_DIFFERENCE = 0.02  # a pixel's distance from its background that makes it a figure's


def train_vae(
    vae: Any,
    corpus: Corpus,
    *,
    minutes: float,
    batch_size: int,
    seed: int,
    kl_weight: float = KL_WEIGHT,
    learning_rate: float = 2.5e-3,
) -> None:
    """Train for so many minutes, then set the config's shift and scaling from its latents.

    The learning rate follows the clock, so a slower machine trains less, not longer. What stays
    in `vae` are the averaged weights.
    """
    device = vae.device
    torch.manual_seed(seed)
    trainer = _VaeTrainer(vae, corpus, batch_size=batch_size)
    start, reported = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        warm = min(1.0, (trainer.step.num_calls + 1) / _WARM_UP_STEPS)
        fall = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        trainer.rate.fill_(learning_rate * warm * fall)
        trainer.kl_weight.fill_(kl_weight * min(1, done / _KL_WARM_UP))
        for _ in range(10):
            trainer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock counts work done, not work queued
        if trainer.step.num_calls - reported >= _LOG_EVERY:
            means = (trainer.sums / (trainer.step.num_calls - reported)).tolist()
            reported = trainer.step.num_calls
            trainer.sums.zero_()
            _log.info(
                "vae step %d, %.0f %%: error on figures %.4f, on ground %.4f, kl %.3f",
                *(reported, 100 * done, *means),
            )
    trainer.average_into(vae)
    latents = encode(
        vae, *(part[:_NUM_MEASURED].to(device) for part in (corpus.figures, corpus.backgrounds))
    )
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(scale, 4))
    spread = [round(value, 2) for value in latents.std(dim=(0, 2, 3)).tolist()]
    _log.info("latents: shift %.4f, scale %.4f, spread by channel %s", shift, scale, spread)


class _VaeTrainer:
    """One step of training: draw, encode, sample, decode, update, average."""

    def __init__(self, vae: Any, corpus: Corpus, *, batch_size: int) -> None:
        device = vae.device
        self._vae = vae.to(memory_format=torch.channels_last).train()
        self._averaged = copy.deepcopy(vae).eval().requires_grad_(False)
        self._weights, self._means = list(vae.parameters()), list(self._averaged.parameters())
        self._batch_size, self._device = batch_size, device
        self._figures, self._backgrounds = corpus.figures.to(device), corpus.backgrounds.to(device)
        self.rate, self.kl_weight = torch.zeros((), device=device), torch.zeros((), device=device)
        self.sums = torch.zeros(3, device=device)
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=self.rate,
            betas=(0.9, 0.99),
            weight_decay=1e-4,
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )
        self.step = CapturedStep(self._update, device=device)

    def average_into(self, vae: Any) -> None:
        """Give `vae` the averaged weights, contiguous and ready for use."""
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._means)
        vae.to(memory_format=torch.contiguous_format).eval()

    def _update(self) -> None:
        chosen = torch.randint(len(self._figures), (self._batch_size,), device=self._device)
        drawn = render(self._figures[chosen], self._backgrounds[chosen])
        # a figure covers little of a picture: each part counts as much as the other
        distance = (drawn - drawn[:, :, :1, :1]).abs().sum(1, keepdim=True)
        is_figure = (distance > _FIGURE_DIFFERENCE).float()
        pictures = (drawn * 2 - 1).contiguous(memory_format=torch.channels_last)
        with torch.autocast(
            self._device.type,
            dtype=torch.bfloat16,
            enabled=self._device.type == "cuda",
            cache_enabled=False,
        ):
            posterior = self._vae.encode(pictures).latent_dist
            painted = self._vae.decode(posterior.sample()).sample
        difference = painted.float() - pictures
        error = difference.abs() + 0.5 * difference.square()
        on_figures = (error * is_figure).sum() / (3 * is_figure.sum() + 1)
        on_ground = (error * (1 - is_figure)).sum() / (3 * (1 - is_figure).sum() + 1)
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(on_figures + on_ground + self.kl_weight * kl)
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._means, self._weights, 1 - _EMA_DECAY)
            self.sums += torch.stack([on_figures.detach(), on_ground.detach(), kl.detach()])


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

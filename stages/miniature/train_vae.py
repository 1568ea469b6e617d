"""Training of the miniature's autoencoder on drawn scenes, and its latents' scale."""

import logging
import math
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from stages.miniature.data import Corpus
from stages.miniature.draw import render
from stages.miniature.optim import CapturedStep

_log = logging.getLogger(__name__)

KL_WEIGHT = 1e-2
"""Of the mean over latent elements, beside a mean absolute error over pixels in -1..1."""

_LEARNING_RATE = 2e-3
_LOG_EVERY = 500
_NUM_MEASURED = 4096
_WARM_UP = 0.02  # share of the run in which the learning rate rises
_KL_WARM_UP = 0.3  # and the weight of the KL: a decoder that sees nothing yet must not lose to it


def train_vae(
    vae: Any,
    corpus: Corpus,
    *,
    minutes: float,
    batch_size: int,
    seed: int,
    kl_weight: float = KL_WEIGHT,
) -> None:
    """Train for so many minutes, then set the config's shift and scaling from its latents.

    The learning rate follows the clock, so a slower machine trains less, not longer.
    """
    device = vae.device
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    vae.train()
    trainer = _VaeTrainer(vae, corpus, batch_size=batch_size)
    start, reported = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        fall = (1 + math.cos(math.pi * done)) / 2
        trainer.rate.fill_(_LEARNING_RATE * min(1, done / _WARM_UP + 1e-2) * fall)
        trainer.kl_weight.fill_(kl_weight * min(1, done / _KL_WARM_UP))
        for _ in range(10):
            trainer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock counts work done, not work queued
        if trainer.step.num_calls - reported >= _LOG_EVERY:
            error, kl = (trainer.sums / (trainer.step.num_calls - reported)).tolist()
            reported = trainer.step.num_calls
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
        self.step = CapturedStep(self._update, device=device)

    def _update(self) -> None:
        chosen = torch.randint(len(self._figures), (self._batch_size,), device=self._device)
        pictures = render(self._figures[chosen], self._backgrounds[chosen]) * 2 - 1
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

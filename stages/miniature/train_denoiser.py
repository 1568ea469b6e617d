"""Joint training of the miniature's text encoder and transformer by flow matching.

The state between noise and picture at noise level s is (1 - s) * latents + s * noise; the
transformer is told 1 - s and learns latents - noise, the negative of the scheduler's velocity.
"""

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from stages.miniature.data import Corpus
from stages.miniature.forward import PAD_MULTIPLE, Forward
from stages.miniature.optim import CapturedStep, Muon

_EMA_DECAY = 0.999
_TRAINING_SHIFT = 3.0  # the scheduler spends more of its steps at high noise: 6.0
_WARM_UP_STEPS = 500
_LAST_RATE = 0.01  # share of the learning rate left at the end


class DenoiserTrainer:
    """Owns the optimizer and the averaged weights of one training run.

    On CUDA each whole step (draw a batch, forward, backward, update) is one captured graph per
    caption length; on CPU the same step runs eagerly.

    Args:
        pipeline: A `ZImagePipeline` whose modules lie on the training device; trained in place.
        latents: Scaled latents `(N, C, 16, 16)`, one for each picture of the corpus.
        compile_layers: Fuse kernels, on CUDA alone; costs a minute of compilation.
        learning_rate: Peak, reached after 500 steps; falls as a cosine of `progress`.
    """

    def __init__(
        self,
        pipeline: Any,
        corpus: Corpus,
        latents: Tensor,
        *,
        batch_size: int,
        learning_rate: float,
        compile_layers: bool = True,
    ) -> None:
        self.device = latents.device
        self._is_cuda = self.device.type == "cuda"
        self._latents = latents
        self._captions = {
            length: (
                captions.ids.to(self.device),
                captions.lengths.to(self.device),
                captions.picture.to(self.device),
            )
            for length, captions in corpus.captions.items()
            if len(captions.ids)
        }
        self.shares = {length: len(item[0]) for length, item in self._captions.items()}
        self._batch_size = batch_size
        self._shift = _TRAINING_SHIFT
        modules = (pipeline.text_encoder, pipeline.transformer)
        for module in modules:
            module.train()
        self.averaged = tuple(
            copy.deepcopy(module).eval().requires_grad_(False) for module in modules
        )
        # the text encoder's last layer and norm feed nothing that the pipeline reads
        unused = {
            id(p) for part in (modules[0].layers[-1], modules[0].norm) for p in part.parameters()
        }
        pairs = [
            (mine, mean)
            for module, twin in zip(modules, self.averaged, strict=True)
            for mine, mean in zip(module.parameters(), twin.parameters(), strict=True)
            if id(mine) not in unused
        ]
        self._weights = [mine for mine, _ in pairs]
        self._means = [mean for _, mean in pairs]
        self._plain = Forward(*modules)
        # short captions are nearly all: only their shapes are worth compiling for
        self._fast = Forward(*modules, compile_layers=self._is_cuda and compile_layers)
        self._peak = learning_rate
        self._rate = torch.tensor(0.0, device=self.device)
        inner = {id(w) for w in _inner_matrices(*modules)} - unused
        outer = [w for w in self._weights if id(w) not in inner]
        self._muon = Muon([w for w in self._weights if id(w) in inner], self._rate)
        self._adam = torch.optim.AdamW(
            outer,
            lr=self._rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self._is_cuda,
            capturable=self._is_cuda,
        )
        self._done = 0  # steps before a restore
        self._loss = torch.zeros((), device=self.device)
        self._steps = {
            length: CapturedStep(partial(self._update, length), device=self.device)
            for length in self._captions
        }

    @property
    def num_steps(self) -> int:
        """Updates since the weights were random."""
        return self._done + sum(step.num_calls for step in self._steps.values())

    def step(self, length: int, *, progress: float) -> None:
        """One update on captions that fill `length` tokens; `progress` runs from 0 to 1."""
        warm = min(1.0, (self.num_steps + 1) / _WARM_UP_STEPS)
        fall = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self._rate.fill_(self._peak * warm * fall)
        self._steps[length]()

    def take_loss(self, num_steps: int) -> float:
        """Mean loss of so many last steps; synchronises with the device."""
        loss = self._loss.item() / num_steps
        self._loss.zero_()
        return loss

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, tensors on CPU."""
        return {
            "weights": [w.detach().cpu() for w in self._weights],
            "means": [m.cpu() for m in self._means],
            "muon": self._muon.state(),
            "adam": self._adam.state_dict(),
            "num_steps": self.num_steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; call before the first step."""
        with torch.no_grad():
            for mine, saved in zip(
                self._weights + self._means, state["weights"] + state["means"], strict=True
            ):
                mine.copy_(saved)
        self._muon.restore(state["muon"])
        self._adam.load_state_dict(state["adam"])
        for group in self._adam.param_groups:
            group["lr"] = self._rate
        self._done = state["num_steps"]

    def _update(self, length: int) -> None:
        ids, lengths, picture = self._captions[length]
        chosen = torch.randint(len(ids), (self._batch_size,), device=self.device)
        clean = self._latents[picture[chosen].long()].float()
        noise = torch.randn_like(clean)
        level = self._noise_levels()
        mixed = torch.lerp(clean, noise, level[:, None, None, None])
        forward = self._fast if length == PAD_MULTIPLE else self._plain
        # without its cache, autocast captures the casts of the weights in every replay
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self._is_cuda, cache_enabled=False
        ):
            features = forward.encode(ids[chosen].long())
            output = forward.predict(mixed, 1 - level, features, lengths[chosen])
        loss = F.mse_loss(output.float(), clean - noise)
        for weight in self._weights:
            weight.grad = None
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._adam.step()
        self._muon.step()
        with torch.no_grad():
            torch._foreach_lerp_(self._means, self._weights, 1 - _EMA_DECAY)
        self._loss += loss.detach()

    def _noise_levels(self) -> Tensor:
        """Half uniform, half logit-normal, then shifted to high noise as the scheduler's are."""
        size, device = (self._batch_size,), self.device
        uniform, normal = (
            torch.rand(size, device=device),
            torch.randn(size, device=device).sigmoid(),
        )
        level = torch.where(torch.rand(size, device=device) < 0.5, uniform, normal)
        return self._shift * level / (1 + (self._shift - 1) * level)


def _inner_matrices(text_encoder: Any, transformer: Any) -> list[Tensor]:
    """The matrices between a block's norms: attention and feed-forward, not the modulation."""
    layers = [*text_encoder.layers]
    layers += [*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers]
    return [
        weight
        for layer in layers
        for name, weight in layer.named_parameters()
        if weight.ndim == 2 and "adaLN" not in name
    ]

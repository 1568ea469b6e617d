"""Optimizers and captured steps of the training: Muon for matrices, CUDA graphs for speed."""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_WARM_STARTS = 3  # runs before a capture: compilation, optimizer state, cached tables
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iterates approach U V^T
_ITERATIONS = 5


class Muon:
    """Momentum whose update is made orthogonal, for the matrices inside a transformer.

    Matrices of one shape are stacked and updated by one batched product. The update is scaled to
    the size that AdamW's would have (root mean square 0.2), so both take one learning rate.
    See Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), and
    Liu et al., "Muon is scalable for LLM training" (2025), for the scale.

    Args:
        weights: Matrices; updated in place.
        rate: Learning rate, a scalar tensor on their device, read at every step.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        rate: Tensor,
        *,
        momentum: float = 0.95,
        decay: float = 0.05,
    ) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            by_shape.setdefault(weight.shape, []).append(weight)
        self._stacks = list(by_shape.values())
        self._momenta = [torch.zeros_like(torch.stack(stack).detach()) for stack in self._stacks]
        self._rate, self._momentum, self._decay = rate, momentum, decay

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients; every weight must have one."""
        for stack, momentum in zip(self._stacks, self._momenta, strict=True):
            gradients = torch.stack([weight.grad for weight in stack if weight.grad is not None])
            momentum.lerp_(gradients, 1 - self._momentum)
            ahead = gradients.lerp(momentum, self._momentum)
            scale = 0.2 * math.sqrt(max(ahead.shape[-2:]))
            update = orthogonalise(ahead).to(momentum.dtype) * (scale * self._rate)
            torch._foreach_mul_(stack, 1 - self._rate * self._decay)
            torch._foreach_sub_(stack, list(update.unbind()))

    def state(self) -> list[Tensor]:
        """The momenta, shared."""
        return self._momenta

    def restore(self, momenta: Sequence[Tensor]) -> None:
        """Copy in what `state` gave."""
        for mine, saved in zip(self._momenta, momenta, strict=True):
            mine.copy_(saved)


def orthogonalise(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix of each, `(N, a, b)` bfloat16; singular values near 1."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class CapturedStep:
    """A training step that CUDA replays as one graph; on CPU it is just called.

    `update` takes no argument and reads all that changes from tensors. The first call runs it a
    few times before it captures it; `num_calls` counts these runs too.
    """

    def __init__(self, update: Callable[[], None], *, device: torch.device) -> None:
        self._update = update
        self._is_cuda = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self.num_calls = 0

    def __call__(self) -> None:
        """Run the step once; the first call on CUDA runs it several times."""
        self.num_calls += 1
        if not self._is_cuda:
            self._update()
            return
        if self._graph is None:
            self._graph = self._capture()
            self.num_calls += _WARM_STARTS
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STARTS):
                self._update()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update()
        _log.info("captured a step")
        return graph

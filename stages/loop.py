"""One hook on a pipeline's denoising loop: progress, and where values stopped being finite."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

OnStep = Callable[[int, int], None]
"""Called after each step with the number of finished steps and of all steps."""


class FiniteWatch:
    """Remembers on the device, step by step, whether the carried tensors are finite.

    Nothing is read back before `first_bad_step`, so that watching adds no synchronisation.
    """

    def __init__(self, carried: Sequence[str]) -> None:
        self._carried = carried
        self._flags: list[torch.Tensor] = []

    def look(self, block_state: Any) -> None:
        """Record this step's verdict."""
        tensors = [getattr(block_state, name, None) for name in self._carried]
        found = [t.isfinite().all() for t in tensors if isinstance(t, torch.Tensor)]
        if found:
            self._flags.append(torch.stack(found).all())

    def first_bad_step(self) -> int | None:
        """The first step, from 1, whose tensors were not finite. Synchronises."""
        if not self._flags:
            return None
        verdicts = torch.stack(self._flags).cpu()
        bad = torch.nonzero(~verdicts)
        return None if len(bad) == 0 else int(bad[0]) + 1


def find_loop(blocks: Any) -> Any | None:
    """The pipeline's one looping block, or None when it has none or several."""
    loops = list(_loops(blocks))
    return loops[0] if len(loops) == 1 else None


def _loops(blocks: Any) -> Iterator[Any]:
    from diffusers.modular_pipelines import LoopSequentialPipelineBlocks

    if isinstance(blocks, LoopSequentialPipelineBlocks):
        yield blocks
        return
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield from _loops(block)


@contextmanager
def watched(blocks: Any, on_step: OnStep, watch: FiniteWatch) -> Iterator[None]:
    """While open, call `on_step` and `watch` after each step of the loop in `blocks`."""
    loop = find_loop(blocks)
    if loop is None:
        yield
        return
    step_of_class = type(loop).loop_step

    def loop_step(self: Any, components: Any, block_state: Any, **position: Any) -> Any:
        components, block_state = step_of_class(self, components, block_state, **position)
        watch.look(block_state)
        index = position.get("i", position.get("k", 0))
        on_step(index + 1, len(block_state.timesteps))
        return components, block_state

    loop.loop_step = types.MethodType(loop_step, loop)
    try:
        yield
    finally:
        del loop.loop_step

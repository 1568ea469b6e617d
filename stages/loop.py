"""One hook on a pipeline's denoising loop.

Through it go progress, the step after which values stopped being finite, and checkpoints.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

OnStep = Callable[[int, int], None]
"""Called after each step with the number of finished steps and of all steps."""

Look = Callable[[int, int, Any, Any], None]
"""Called like that, and with the pipeline and the loop's values, which it only reads."""


class Keeper(Protocol):
    """Lets a loop begin later than at its first step; see `stages.checkpoints`."""

    def begin(self, pipe: Any, block_state: Any) -> int:
        """Called before the first step; returns how many steps need not be run."""

    def step_done(self, step: int, num_steps: int, block_state: Any) -> None:
        """Called after each step that was run, with the number of finished steps."""


class FiniteWatch:
    """Remembers on the device, step by step, whether the carried tensors are finite.

    Nothing is read back before `first_bad_step`, so that watching adds no synchronisation.
    """

    def __init__(self, carried: Sequence[str]) -> None:
        self._carried = carried
        self._flags: list[torch.Tensor] = []
        self._steps: list[int] = []

    def look(self, block_state: Any, step: int) -> None:
        """Record the verdict on the values after `step` steps."""
        tensors = [getattr(block_state, name, None) for name in self._carried]
        found = [t.isfinite().all() for t in tensors if isinstance(t, torch.Tensor)]
        if found:
            self._flags.append(torch.stack(found).all())
            self._steps.append(step)

    def first_bad_step(self) -> int | None:
        """The first step, from 1, whose tensors were not finite. Synchronises."""
        if not self._flags:
            return None
        verdicts = torch.stack(self._flags).cpu()
        bad = torch.nonzero(~verdicts)
        return None if len(bad) == 0 else self._steps[int(bad[0])]


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
def watched(
    blocks: Any,
    on_step: OnStep,
    watch: FiniteWatch,
    keeper: Keeper | None = None,
    look: Look | None = None,
) -> Iterator[None]:
    """While open, call `on_step` and `watch` after each step of the loop in `blocks`.

    Args:
        keeper: Told of each step before `on_step` is; may let the first ones be left out. Their
            number stands at the loop as `num_skipped`.
        look: Looks at the loop's values after each step, when it was told of.
    """
    loop = find_loop(blocks)
    if loop is None:
        yield
        return
    step_of_class = type(loop).loop_step
    num_skipped = 0

    def loop_step(self: Any, components: Any, block_state: Any, **position: Any) -> Any:
        nonlocal num_skipped
        index = position.get("i", position.get("k", 0))
        keeps = keeper if "i" in position else None  # chunks (`k`) have loops of their own inside
        if keeps is not None and index == 0:
            num_skipped = loop.num_skipped = keeps.begin(components, block_state)
        if index < num_skipped:
            return components, block_state
        components, block_state = step_of_class(self, components, block_state, **position)
        num_steps = len(block_state.timesteps)
        watch.look(block_state, index + 1)
        if keeps is not None:  # first: a step that was told of is one that is kept
            keeps.step_done(index + 1, num_steps, block_state)
        on_step(index + 1, num_steps)
        if look is not None and "i" in position:
            look(index + 1, num_steps, components, block_state)
        return components, block_state

    loop.loop_step = types.MethodType(loop_step, loop)
    try:
        yield
    finally:
        del loop.loop_step

"""One step observed: the order of use, how long each block computed and waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ddo.transfer import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """What one step showed. Blocks are numbered as in the session.

    Attributes:
        order: Blocks in the order of use, repetitions included.
        compute_s: Time from each block's first operation to the next block's, attention and
            other work without weights included; None where the device keeps no time.
        stall_s: Time that each block waited for its copy.
        step_s: From the first block to the end of the step.
    """

    order: tuple[int, ...]
    compute_s: dict[int, float] | None
    stall_s: dict[int, float]
    step_s: float | None


@dataclass(slots=True)
class _Mark:
    block: int
    reached: Any
    began: Any


class Recorder:
    """Puts timed fences into the stream of one step. It never waits for them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._marks: list[_Mark] = []
        self._end: Any = None

    def reach(self, block: int) -> None:
        """The step has come to a block, which may still be on its way."""
        fence = self._backend.fence(is_timed=True)
        self._backend.record(fence)
        self._marks.append(_Mark(block, fence, fence))

    def begin(self) -> None:
        """The block just reached is there."""
        fence = self._backend.fence(is_timed=True)
        self._backend.record(fence)
        self._marks[-1].began = fence

    def end(self) -> None:
        """The step is over."""
        self._end = self._backend.fence(is_timed=True)
        self._backend.record(self._end)

    def harvest(self) -> StepProfile | None:
        """The profile, or None while the device has not come to the end of the step."""
        if self._end is None or not self._end.is_complete():
            return None
        order = tuple(mark.block for mark in self._marks)
        compute_s: defaultdict[int, float] = defaultdict(float)
        stall_s: defaultdict[int, float] = defaultdict(float)
        ends = [*(mark.reached for mark in self._marks[1:]), self._end]
        for mark, end in zip(self._marks, ends, strict=True):
            computed = self._backend.elapsed_s(mark.began, end)
            if computed is None:
                return StepProfile(order=order, compute_s=None, stall_s={}, step_s=None)
            compute_s[mark.block] += computed
            if mark.began is not mark.reached:
                stall_s[mark.block] += self._backend.elapsed_s(mark.reached, mark.began) or 0.0
        step_s = self._backend.elapsed_s(self._marks[0].reached, self._end) if order else None
        return StepProfile(
            order=order, compute_s=dict(compute_s), stall_s=dict(stall_s), step_s=step_s
        )

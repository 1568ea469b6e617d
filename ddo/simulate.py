"""The steady rhythm of a ring that is filled in order while its blocks are used in order.

A step uses every block once, in order. A streamed block is used after its copy; it is copied
after the copy before it and after the last use of whatever lies at its place. Copies know no
step boundary. From these rules alone follow all times, so the simulation is exact for them:
what a device adds is only that copies and computation share its memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_MIN_STEPS, _MAX_STEPS, _MAX_USES = 12, 64, 4000
_TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class Use:
    """One block in the order of use.

    Attributes:
        compute_s: Time of its computation.
        copy_s: Time of its copy; 0 for a resident block.
        begin: First byte of its place in the ring.
        end: One past its last byte; equal to `begin` for a resident block.
    """

    compute_s: float
    copy_s: float = 0.0
    begin: int = 0
    end: int = 0

    @property
    def is_streamed(self) -> bool:
        return self.end > self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The steady state of a cycle of uses.

    Attributes:
        step_s: Time from one step's end to the next one's.
        stalls_s: How long each block's computation waited for its copy.
        copied: Whether each block is copied in every step.
        num_ahead: Streamed blocks that a step's end finds copied for the next step, one that is
            half copied included.
    """

    step_s: float
    stalls_s: tuple[float, ...]
    copied: tuple[bool, ...]
    num_ahead: int = 0


def simulate(uses: Sequence[Use]) -> Timeline:
    """Run steps until several in a row take equally long; of the most, the last half counts."""
    waits = predecessors([(use.begin, use.end) for use in uses])
    moving = [i for i, use in enumerate(uses) if use.is_streamed and waits[i]]
    copied = [False] * len(uses)
    for i in moving:
        copied[i] = True
    compute_s = sum(use.compute_s for use in uses)
    if not moving:
        return Timeline(
            step_s=compute_s,
            stalls_s=(0.0,) * len(uses),
            copied=tuple(copied),
            num_ahead=sum(use.is_streamed for use in uses),
        )
    # Residents only take time: it is added to the moving block before them.
    rank = {i: k for k, i in enumerate(moving)}
    before_s = sum(use.compute_s for use in uses[: moving[0]])
    blocks = [
        (
            uses[i].copy_s,
            uses[i].compute_s,
            sum(use.compute_s for use in uses[i + 1 : end]),
            [(rank[j], is_earlier) for j, is_earlier in waits[i] if j in rank],
        )
        for i, end in zip(moving, [*moving[1:], len(uses)], strict=True)
    ]
    ends = [0.0] * len(blocks)  # of each block's latest use
    previous = list(ends)
    stalls = [0.0] * len(blocks)
    halves = [0.0] * len(blocks)  # of each block's latest copy
    clock = copies_done = 0.0
    durations: list[float] = []
    max_steps = max(_MIN_STEPS, min(_MAX_STEPS, _MAX_USES // len(blocks)))
    while len(durations) < max_steps and not _is_steady(durations):
        start = clock
        clock += before_s
        for k, (copy_s, use_s, then_s, waiting) in enumerate(blocks):
            begin = copies_done
            for j, is_earlier in waiting:
                end = previous[j] if is_earlier else ends[j]
                begin = max(begin, end)
            copies_done = begin + copy_s
            halves[k] = begin + copy_s / 2
            stalls[k] = copies_done - clock if copies_done > clock else 0.0
            clock += stalls[k] + use_s
            ends[k] = clock
            clock += then_s
        previous = list(ends)
        durations.append(clock - start)
    steady = durations[-1:] if _is_steady(durations) else durations[len(durations) // 2 :]
    stalls_s = [0.0] * len(uses)
    for i, stall in zip(moving, stalls, strict=True):
        stalls_s[i] = stall
    early = bisect_right(halves, start)
    first_late = moving[early] if early < len(moving) else len(uses)
    return Timeline(
        step_s=sum(steady) / len(steady),
        stalls_s=tuple(stalls_s),
        copied=tuple(copied),
        num_ahead=sum(use.is_streamed for use in uses[:first_late]),
    )


def _is_steady(durations: list[float]) -> bool:
    """Three equal steps; fewer may be the plateau before a backlog reaches the boundary."""
    if len(durations) < 4:
        return False
    last = durations[-3:]
    return max(last) - min(last) <= _TOLERANCE * max(last)


def predecessors(places: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, bool], ...]]:
    """For each place, the uses that must be over before it is written again.

    Args:
        places: `(begin, end)` of each use in order; empty for what is not in the ring.

    Returns:
        Per place, `(index, is_earlier_step)` of the latest uses that cover its bytes, newest
        first; empty where nothing else overlaps it, so that its bytes stay.
    """
    in_ring = [i for i, (begin, end) in enumerate(places) if end > begin]
    found: list[tuple[tuple[int, bool], ...]] = [()] * len(places)
    # Who wrote last, as stretches side by side: stretch k is [starts[k], starts[k + 1]).
    starts: list[int] = [0]
    writers: list[tuple[int, int]] = [(-1, -1)]  # step and index
    for step in (0, 1):
        for i in in_ring:
            begin, end = places[i]
            for cut in (begin, end):
                at = bisect_left(starts, cut)
                if at == len(starts) or starts[at] != cut:
                    starts.insert(at, cut)
                    writers.insert(at, writers[at - 1])
            low, high = bisect_left(starts, begin), bisect_left(starts, end)
            if step == 1:
                latest = sorted({w for w in writers[low:high] if w[1] >= 0}, reverse=True)
                if any(j != i for _, j in latest):
                    found[i] = tuple((j, at_step == 0) for at_step, j in latest)
            starts[low:high] = [begin]
            writers[low:high] = [(step, i)]
    return found

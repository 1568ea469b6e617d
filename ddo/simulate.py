"""The steady rhythm of a ring that is filled in order while its blocks are used in order.

A step uses every block once, in order. A streamed block is used after its copy; it is copied
after the copy before it and after the last use of whatever lies at its place. Copies know no
step boundary. From these rules alone follow all times, so the simulation is exact for them:
what a device adds is only that copies and computation share its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_STEPS = 96
_TOLERANCE = 1e-9


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
    """

    step_s: float
    stalls_s: tuple[float, ...]
    copied: tuple[bool, ...]


def simulate(uses: Sequence[Use]) -> Timeline:
    """Run steps until two in a row take equally long; at most 96, then their mean counts."""
    waits = predecessors([(use.begin, use.end) for use in uses])
    copied = [use.is_streamed and bool(waits[i]) for i, use in enumerate(uses)]
    previous = [0.0] * len(uses)
    clock = copies_done = 0.0
    durations: list[float] = []
    stalls = [0.0] * len(uses)
    while len(durations) < _MAX_STEPS:
        start = clock
        current = [0.0] * len(uses)
        for i, use in enumerate(uses):
            if copied[i]:
                begin = copies_done
                for j, is_earlier_step in waits[i]:
                    begin = max(begin, previous[j] if is_earlier_step else current[j])
                copies_done = begin + use.copy_s
                stalls[i] = max(0.0, copies_done - clock)
                clock += stalls[i]
            clock += use.compute_s
            current[i] = clock
        previous = current
        durations.append(clock - start)
        if _is_steady(durations):
            return Timeline(step_s=durations[-1], stalls_s=tuple(stalls), copied=tuple(copied))
    half = durations[len(durations) // 2 :]
    return Timeline(step_s=sum(half) / len(half), stalls_s=tuple(stalls), copied=tuple(copied))


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
    count = len(places)
    found: list[tuple[tuple[int, bool], ...]] = []
    in_ring = [i for i, (begin, end) in enumerate(places) if end > begin]
    rank = {i: k for k, i in enumerate(in_ring)}
    for i in range(count):
        if i not in rank:
            found.append(())
            continue
        open_parts = [places[i]]
        waits: list[tuple[int, bool]] = []
        for back in range(1, len(in_ring) + 1):
            j = in_ring[(rank[i] - back) % len(in_ring)]
            rest = _subtract(open_parts, *places[j])
            if rest is not open_parts:
                waits.append((j, j >= i))
                open_parts = rest
            if not open_parts:
                break
        found.append(() if [j for j, _ in waits] == [i] else tuple(waits))
    return found


def _subtract(parts: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The parts without `[begin, end)`; the same list when nothing overlaps."""
    if not any(low < end and begin < high for low, high in parts):
        return parts
    rest: list[tuple[int, int]] = []
    for low, high in parts:
        if low < min(begin, high):
            rest.append((low, min(begin, high)))
        if max(end, low) < high:
            rest.append((max(end, low), high))
    return rest

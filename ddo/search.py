"""The search for the fastest choice: candidates are proposed, simulated and compared.

Of few blocks every choice is tried, but for those that the link alone makes too slow. Of many,
what streams is spread over the computation for a series of ring sizes, and the best of these
are improved by exchanging blocks. A choice of what streams is always tried with several rings:
fewer laps hide more, more laps leave room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice

from ddo.layout import RingLayout, lay_out_ring
from ddo.loads import Link, Load, Residency, place_uses
from ddo.simulate import simulate

_MAX_TRIED = 10  # blocks of which all subsets are tried
_RING_GROWTH = 1.3
_SMALLEST_RING = 16  # rings begin at this part of the largest block
_MAX_BLOCK_SIZES = 40  # that are tried as ring sizes
_MAX_RINGS = 3  # that are tried for one choice of what streams
_MAX_CLIMBS = 4  # from the best spreads
_MAX_SIMULATED_USES = 40_000  # some hundredths of a second of Python
_MAX_NEIGHBOURS = 4_000  # looked at, simulated or not
_SAME = 1e-4  # step times closer than this share are equal: fewer bytes decide


class Search:
    """Looks for the choice with the shortest simulated step whose bytes fit a budget.

    Attributes:
        best: The best choice so far.
        num_simulated: Choices that were compared.
    """

    def __init__(self, loads: Sequence[Load], link: Link, budget_nbytes: int) -> None:
        self.best: Residency | None = None
        self.num_simulated = 0
        self._loads = loads
        self._link = link
        self._budget_nbytes = budget_nbytes
        self._sizes = [load.nbytes for load in loads]
        self._total = sum(self._sizes)
        self._compute_s = sum(load.compute_s for load in loads)
        self._movable = [i for i, load in enumerate(loads) if load.is_movable and load.nbytes]
        self._fixed = self._total - self._nbytes(self._movable)
        self._max_simulated = _MAX_SIMULATED_USES // max(1, 6 * len(loads))
        self._num_neighbours = 0
        self._seen: dict[frozenset[int], Residency | None] = {}

    # ---- ways to propose ----

    def stream_everything(self) -> None:
        """A ring of two laps or more around the largest block; the smallest that fits."""
        largest = max((self._sizes[i] for i in self._movable), default=0)
        for capacity in (2 * largest, largest):
            if self.best is None and self._fixed + capacity <= self._budget_nbytes:
                self._consider_ring(frozenset(self._movable), capacity)

    def try_everything(self) -> bool:
        """All choices, the least copying first; False, untried, if there are too many."""
        if self._total <= self._budget_nbytes:
            self._consider_ring(frozenset(), 0)
            return True
        if len(self._movable) > _MAX_TRIED:
            return False
        subsets = (
            frozenset(subset)
            for count in range(1, len(self._movable) + 1)
            for subset in combinations(self._movable, count)
        )
        for subset in sorted(subsets, key=self._nbytes):
            self._consider(subset, max_rings=len(subset))
        return True

    def spread_over_rings(self, rings: Iterable[int] | None = None) -> None:
        """A spread for each size of ring, by default between one block and all that streams."""
        if self._total <= self._budget_nbytes:
            self._consider_ring(frozenset(), 0)
            return
        free = self._budget_nbytes - self._fixed
        for ring in self._ring_sizes(free) if rings is None else rings:
            if ring > free:
                continue
            streamed = self._spread(ring, free - ring)
            if streamed is None:
                continue
            if self._is_hopeless(streamed):
                return  # a larger ring streams even more
            self._consider_ring(streamed, ring)
            if self._is_bound_by_computation():
                return

    def improve(self) -> None:
        """Exchange blocks of the best choices while that helps, within a bounded effort."""
        if self._is_bound_by_computation():
            return
        starts = sorted(
            (found for found in self._seen.values() if found is not None and found.streamed),
            key=lambda found: found.timeline.step_s,
        )
        for start in starts[:_MAX_CLIMBS]:
            self._climb(start)

    # ---- spreads ----

    def _ring_sizes(self, free: int) -> list[int]:
        """A series between a part of the largest block and all that is free, and block sizes.

        A ring as large as some block lets all larger ones stay; of many sizes the series is
        near enough to each.
        """
        sizes = sorted({self._sizes[i] for i in self._movable})
        if not sizes:
            return []
        found = set(sizes) if len(sizes) <= _MAX_BLOCK_SIZES else set()
        size = float(max(sizes[0], sizes[-1] // _SMALLEST_RING))
        while size <= free:
            found.add(int(size))
            size *= _RING_GROWTH
        return sorted(size for size in {*found, free} if 0 < size <= free)

    def _spread(self, ring: int, resident: int) -> frozenset[int] | None:
        """What streams so that at most `resident` bytes of the movable blocks stay, if it can.

        Bytes are handed out in proportion to computation, carrying the remainder along.
        """
        sizes = self._sizes
        usable = [i for i in self._movable if sizes[i] <= ring]
        goal = self._nbytes(self._movable) - resident
        if self._nbytes(usable) < goal:
            return None
        # Below this size the fixed cost of a copy is a fifth of it: such blocks stay if they can.
        small = 4 * self._link.overhead_s * self._link.bytes_per_s
        large = [i for i in usable if sizes[i] >= small] or usable
        if self._nbytes(large) < goal:
            large = usable
        compute_s = self._compute_s or 1.0
        eligible, chosen, credit, streamed = set(large), set(), 0.0, 0
        for i, load in enumerate(self._loads):
            credit += goal * (load.compute_s / compute_s)
            if i in eligible and credit >= load.nbytes / 2 and streamed < goal:
                chosen.add(i)
                credit -= load.nbytes
                streamed += load.nbytes
        self._complete(chosen, usable, goal)
        return frozenset(chosen)

    def _complete(self, chosen: set[int], usable: list[int], goal: int) -> None:
        """Stream more until `goal` bytes are reached, then keep what exceeds it."""
        sizes = self._sizes
        streamed = self._nbytes(chosen)
        rest = sorted((i for i in usable if i not in chosen), key=lambda i: sizes[i])
        while streamed < goal and rest:
            missing = goal - streamed
            pick = next((i for i in rest if sizes[i] >= missing), rest[-1])
            rest.remove(pick)
            chosen.add(pick)
            streamed += sizes[pick]
        for i in sorted(chosen, key=lambda i: -sizes[i]):
            if streamed - sizes[i] >= goal:
                chosen.discard(i)
                streamed -= sizes[i]

    # ---- exchanges ----

    def _climb(self, current: Residency) -> None:
        while True:
            for streamed in self._neighbours(frozenset(current.streamed)):
                self._num_neighbours += 1
                if self.num_simulated >= self._max_simulated:
                    return
                if self._num_neighbours >= _MAX_NEIGHBOURS:
                    return
                if streamed in self._seen:
                    continue
                found = self._consider(streamed, max_rings=_MAX_RINGS)
                if found is not None and _is_better(found, current, self._sizes):
                    current = found
                    break
            else:
                return

    def _neighbours(self, streamed: frozenset[int]) -> Iterator[frozenset[int]]:
        resident = [i for i in self._movable if i not in streamed]
        for i in sorted(streamed):
            yield streamed - {i}
        for i in resident:
            yield streamed | {i}
        for i in sorted(streamed):
            for j in sorted(resident, key=lambda j: abs(i - j)):
                yield streamed - {i} | {j}
        for i in sorted(streamed):  # one large block for several smaller ones, and the reverse
            for pair in combinations(resident, 2):
                yield streamed - {i} | set(pair)
        for pair in combinations(sorted(streamed), 2):
            for j in resident:
                yield streamed - set(pair) | {j}
        for pair in combinations(resident, 2):
            yield streamed | set(pair)
        for pair in combinations(sorted(streamed), 2):
            for others in combinations(resident, 2):
                yield streamed - set(pair) | set(others)

    # ---- comparison ----

    def _consider(self, streamed: frozenset[int], *, max_rings: int) -> Residency | None:
        """The best of the rings that fit beside the residents, few laps first."""
        found: Residency | None = None
        if not self._is_hopeless(streamed):
            room = self._budget_nbytes - self._total + self._nbytes(streamed)
            order = sorted(streamed)
            for layout in islice(_layouts([self._sizes[i] for i in order], room), max_rings):
                choice = self._simulate(order, layout)
                if found is None or _is_better(choice, found, self._sizes):
                    found = choice
        self._seen[streamed] = found
        return found

    def _consider_ring(self, streamed: frozenset[int], capacity: int) -> None:
        """One choice with a ring of at most `capacity` bytes, if it fits."""
        order = sorted(streamed)
        layout = lay_out_ring([self._sizes[i] for i in order], capacity)
        resident = self._total - self._nbytes(streamed)
        if layout is not None and resident + layout.nbytes <= self._budget_nbytes:
            found = self._simulate(order, layout)
            known = self._seen.get(streamed)
            if known is None or _is_better(found, known, self._sizes):
                self._seen[streamed] = found

    def _simulate(self, order: Sequence[int], layout: RingLayout) -> Residency:
        self.num_simulated += 1
        found = Residency(
            streamed=tuple(order),
            ring=layout,
            timeline=simulate(place_uses(self._loads, self._link, order, layout)),
            device_nbytes=self._total - self._nbytes(order) + layout.nbytes,
            num_simulated=self.num_simulated,
        )
        if self.best is None or _is_better(found, self.best, self._sizes):
            self.best = found
        return found

    def _is_bound_by_computation(self) -> bool:
        """Whether no choice is faster, and larger rings would only copy more."""
        return self.best is not None and self.best.timeline.step_s <= self._compute_s * (1 + _SAME)

    def _is_hopeless(self, streamed: Iterable[int]) -> bool:
        """Whether the copies alone take longer than the best step.

        A block that nothing in the ring overlaps would not be copied; but then the same choice
        with that block as a resident is among the others.
        """
        if self.best is None:
            return False
        copy_s = sum(self._link.copy_s(self._sizes[i]) for i in streamed)
        return copy_s > self.best.timeline.step_s * (1 + _SAME)

    def _nbytes(self, blocks: Iterable[int]) -> int:
        return sum(self._sizes[i] for i in blocks)


def _layouts(sizes: Sequence[int], room: int) -> Iterator[RingLayout]:
    """All different rings of at most `room` bytes, each with its laps as equal as they can be."""
    capacity = room
    while sizes and (layout := lay_out_ring(sizes, capacity)) is not None:
        yield layout
        capacity = layout.nbytes - 1


def _is_better(new: Residency, old: Residency, sizes: Sequence[int]) -> bool:
    if abs(new.timeline.step_s - old.timeline.step_s) > _SAME * old.timeline.step_s:
        return new.timeline.step_s < old.timeline.step_s
    return _cost(new, sizes) < _cost(old, sizes)


def _cost(choice: Residency, sizes: Sequence[int]) -> tuple[int, int, float]:
    streamed = sum(sizes[i] for i in choice.streamed)
    return streamed, choice.ring.nbytes, choice.timeline.step_s

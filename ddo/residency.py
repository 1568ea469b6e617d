"""Which blocks stay on the device and which stream through the ring. Pure arithmetic.

With `F` bytes free for weights, residents fill what the ring leaves, so a ring of `R` bytes
means that `S = total - F + R` bytes stream per step: a larger ring hides more waiting and costs
more copying. Ring and residents are therefore chosen together, by simulated step time. What
streams is spread over the computation: a run of streamed blocks would empty the ring, and a run
of residents would leave the link idle once the ring is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from ddo.layout import RingLayout, align_up, lay_out_ring
from ddo.simulate import Timeline, Use, simulate

_RING_GROWTH = 1.3
_SMALLEST_RING = 16  # rings begin at this part of the largest block
_MAX_SIMULATED_USES = 40_000  # some hundredths of a second of Python
_SAME = 1e-4  # step times closer than this share are equal: fewer bytes decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One block as the planner sees it, in the order of use.

    Attributes:
        nbytes: Its aligned size on the device.
        compute_s: Time of its computation.
        is_movable: False for what must stay on the device.
    """

    nbytes: int
    compute_s: float
    is_movable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a copy of `n` bytes costs: `overhead_s + n / bytes_per_s` seconds."""

    bytes_per_s: float
    overhead_s: float = 8e-6

    def copy_s(self, nbytes: int) -> float:
        return self.overhead_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A choice and what it is predicted to do.

    Attributes:
        streamed: Indices of the blocks that stream, ascending.
        ring: Their places.
        timeline: The simulated steady state over all blocks.
        device_nbytes: Residents and ring.
        num_simulated: Choices that were compared.
    """

    streamed: tuple[int, ...]
    ring: RingLayout
    timeline: Timeline
    device_nbytes: int
    num_simulated: int


class DoesNotFit(Exception):
    """Even the smallest ring exceeds the budget; `needed_nbytes` would do."""

    def __init__(self, needed_nbytes: int) -> None:
        super().__init__(needed_nbytes)
        self.needed_nbytes = needed_nbytes


def smallest_need(loads: Sequence[Load]) -> int:
    """Bytes below which no choice exists: what cannot move, and a lap of the largest block."""
    fixed = sum(load.nbytes for load in loads if not load.is_movable)
    movable = [load.nbytes for load in loads if load.is_movable]
    best = sum(movable)
    # Keeping a large block costs its size but lets the ring shrink to the next largest.
    kept = 0
    for size in sorted(movable, reverse=True):
        best = min(best, kept + size)
        kept += size
    return fixed + best


def choose_residency(
    loads: Sequence[Load],
    link: Link,
    budget_nbytes: int,
    *,
    ring_nbytes: int | None = None,
    keep_few: bool = False,
) -> Residency:
    """The choice with the shortest simulated step whose residents and ring fit the budget.

    Args:
        ring_nbytes: Compare only rings of this size.
        keep_few: Of the rings, take the smallest that lets copies run beside computation, and
            keep only what cannot move.

    Raises:
        DoesNotFit: No choice fits.
    """
    search = _Search(loads, link, budget_nbytes)
    if keep_few:
        search.stream_everything()
    else:
        search.spread_over_rings(ring_nbytes)
        if ring_nbytes is None:
            search.improve()
    if search.best is None:
        raise DoesNotFit(smallest_need(loads))
    return search.best


def hold_residency(
    loads: Sequence[Load], link: Link, streamed: Sequence[int], ring_nbytes: int
) -> Residency:
    """The same residents in another order of use, with a ring of at most the given size.

    Raises:
        DoesNotFit: A streamed block is larger than the ring.
    """
    order = sorted(streamed)
    sizes = [loads[i].nbytes for i in order]
    layout = lay_out_ring(sizes, ring_nbytes)
    if layout is None:
        raise DoesNotFit(max(sizes))
    resident = sum(load.nbytes for load in loads) - sum(sizes)
    return Residency(
        streamed=tuple(order),
        ring=layout,
        timeline=simulate(place_uses(loads, link, order, layout)),
        device_nbytes=resident + layout.nbytes,
        num_simulated=1,
    )


class _Search:
    """Candidates are proposed, simulated and compared here."""

    def __init__(self, loads: Sequence[Load], link: Link, budget_nbytes: int) -> None:
        self.loads = loads
        self.link = link
        self.budget_nbytes = budget_nbytes
        self.total = sum(load.nbytes for load in loads)
        self.movable = [i for i, load in enumerate(loads) if load.is_movable and load.nbytes]
        self.fixed = self.total - sum(loads[i].nbytes for i in self.movable)
        self.best: Residency | None = None
        self.num_simulated = 0
        self._seen: set[tuple[frozenset[int], int]] = set()

    def stream_everything(self) -> None:
        """A ring of two laps or more around the largest block; the smallest that fits."""
        sizes = [self.loads[i].nbytes for i in self.movable]
        for capacity in (2 * max(sizes, default=0), max(sizes, default=0)):
            if self.best is None and self.fixed + capacity <= self.budget_nbytes:
                self.consider(frozenset(self.movable), capacity)

    def spread_over_rings(self, ring_nbytes: int | None) -> None:
        """A spread for each size of ring between one block and all that streams."""
        if self.total <= self.budget_nbytes:
            self.consider(frozenset(), 0)
            return
        free = self.budget_nbytes - self.fixed
        rings = [ring_nbytes] if ring_nbytes else list(self._ring_sizes(free))
        for ring in rings:
            if ring > free:
                continue
            streamed = self.spread(ring, free - ring)
            if self.best is not None:
                moved = sum(self.loads[i].nbytes for i in streamed)
                if moved / self.link.bytes_per_s > self.best.timeline.step_s:
                    return  # a larger ring streams even more
            self.consider(streamed, ring)

    def _ring_sizes(self, free: int) -> Iterator[int]:
        sizes = sorted({self.loads[i].nbytes for i in self.movable})
        if not sizes:
            return
        size = float(max(sizes[0], sizes[-1] // _SMALLEST_RING))
        while size <= free:
            yield align_up(int(size))
            size *= _RING_GROWTH
        yield free

    def spread(self, ring: int, resident: int) -> frozenset[int]:
        """What streams so that at most `resident` bytes of the movable blocks stay.

        Bytes are handed out in proportion to computation, carrying the remainder along.
        """
        usable = [i for i in self.movable if self.loads[i].nbytes <= ring]
        goal = sum(self.loads[i].nbytes for i in self.movable) - resident
        # Below this size the fixed cost of a copy is a fifth of it: such blocks stay if they can.
        small = 4 * self.link.overhead_s * self.link.bytes_per_s
        large = [i for i in usable if self.loads[i].nbytes >= small] or usable
        if sum(self.loads[i].nbytes for i in large) < goal:
            large = usable
        compute_s = sum(load.compute_s for load in self.loads) or 1.0
        eligible, chosen, credit, streamed = set(large), set(), 0.0, 0
        for i, load in enumerate(self.loads):
            credit += goal * (load.compute_s / compute_s)
            if i in eligible and credit >= load.nbytes / 2 and streamed < goal:
                chosen.add(i)
                credit -= load.nbytes
                streamed += load.nbytes
        self._complete(chosen, usable, goal)
        return frozenset(chosen)

    def _complete(self, chosen: set[int], usable: list[int], goal: int) -> None:
        """Stream more until `goal` bytes are reached, then keep what exceeds it."""
        streamed = sum(self.loads[i].nbytes for i in chosen)
        rest = sorted((i for i in usable if i not in chosen), key=lambda i: self.loads[i].nbytes)
        while streamed < goal and rest:
            missing = goal - streamed
            pick = next((i for i in rest if self.loads[i].nbytes >= missing), rest[-1])
            rest.remove(pick)
            chosen.add(pick)
            streamed += self.loads[pick].nbytes
        for i in sorted(chosen, key=lambda i: -self.loads[i].nbytes):
            if streamed - self.loads[i].nbytes >= goal:
                chosen.discard(i)
                streamed -= self.loads[i].nbytes

    def consider(self, streamed: frozenset[int], ring: int) -> bool:
        """Simulate one choice and keep it if it is the best so far."""
        if (streamed, ring) in self._seen:
            return False
        self._seen.add((streamed, ring))
        order = sorted(streamed)
        layout = lay_out_ring([self.loads[i].nbytes for i in order], ring)
        if layout is None:
            return False
        resident = self.total - sum(self.loads[i].nbytes for i in order)
        if resident + layout.nbytes > self.budget_nbytes:
            return False
        timeline = simulate(place_uses(self.loads, self.link, order, layout))
        self.num_simulated += 1
        found = Residency(
            streamed=tuple(order),
            ring=layout,
            timeline=timeline,
            device_nbytes=resident + layout.nbytes,
            num_simulated=self.num_simulated,
        )
        if self.best is not None and not self._is_better(found, self.best):
            return False
        self.best = found
        return True

    def _is_better(self, new: Residency, old: Residency) -> bool:
        if abs(new.timeline.step_s - old.timeline.step_s) > _SAME * old.timeline.step_s:
            return new.timeline.step_s < old.timeline.step_s
        return self._cost(new) < self._cost(old)

    def _cost(self, choice: Residency) -> tuple[int, int, float]:
        streamed = sum(self.loads[i].nbytes for i in choice.streamed)
        return streamed, choice.ring.nbytes, choice.timeline.step_s

    def improve(self) -> None:
        """Exchange single blocks while that shortens the step, within a bounded effort."""
        limit = _MAX_SIMULATED_USES // max(1, 6 * len(self.loads))
        while self.best is not None and self.best.streamed and self._improve_once(limit):
            pass

    def _improve_once(self, limit: int) -> bool:
        assert self.best is not None
        start, size = frozenset(self.best.streamed), self.best.ring.nbytes
        for streamed in self._neighbours(start):
            sizes = [self.loads[i].nbytes for i in streamed]
            room = self.budget_nbytes - self.total + sum(sizes)
            for ring in {size, room, sum(sizes) // 2 + max(sizes, default=0) // 2}:
                if self.num_simulated >= limit:
                    return False
                if 0 < ring <= room and self.consider(streamed, ring):
                    return True
        return False

    def _neighbours(self, streamed: frozenset[int]) -> Iterator[frozenset[int]]:
        for i in sorted(streamed):
            yield streamed - {i}
        resident = [i for i in self.movable if i not in streamed]
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


def place_uses(
    loads: Sequence[Load], link: Link, streamed: Sequence[int], layout: RingLayout
) -> list[Use]:
    """What `simulate` needs for a choice: every block in order, streamed ones at their place."""
    places = dict(zip(streamed, layout.offsets, strict=True))
    return [
        Use(load.compute_s, link.copy_s(load.nbytes), places[i], places[i] + load.nbytes)
        if i in places
        else Use(load.compute_s)
        for i, load in enumerate(loads)
    ]

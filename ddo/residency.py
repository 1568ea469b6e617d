"""Which blocks stay on the device and which stream through the ring. Pure arithmetic.

With `F` bytes free for weights, residents fill what the ring leaves, so a ring of `R` bytes
means that `S = total - F + R` bytes stream per step: a larger ring hides more waiting and costs
more copying. Ring and residents are therefore chosen together, by simulated step time. What
streams is spread over the computation: a run of streamed blocks would empty the ring, and a run
of residents would leave the link idle once the ring is full.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddo.layout import lay_out_ring
from ddo.loads import Link, Load, Residency, place_uses
from ddo.search import Search
from ddo.simulate import simulate


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
    search = Search(loads, link, budget_nbytes)
    if keep_few:
        search.stream_everything()
    elif ring_nbytes is not None:
        search.spread_over_rings([ring_nbytes])
    elif not search.try_everything():
        search.spread_over_rings()
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

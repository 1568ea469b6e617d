"""What the planner reckons with: blocks, the link, and a choice of what stays and what streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddo.layout import RingLayout
from ddo.simulate import Timeline, Use


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

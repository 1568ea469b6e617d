from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddo.layout import lay_out_ring
from ddo.residency import DoesNotFit, Link, Load, choose_residency, place_uses, smallest_need
from ddo.simulate import simulate

LINK = Link(bytes_per_s=1.0, overhead_s=0.0)


def exhaustive_best(loads, budget):
    """The shortest step of all subsets and all rings that fit."""
    best = None
    movable = [i for i, load in enumerate(loads) if load.is_movable]
    for count in range(len(movable) + 1):
        for streamed in combinations(movable, count):
            sizes = [loads[i].nbytes for i in streamed]
            resident = sum(load.nbytes for load in loads) - sum(sizes)
            for capacity in range(max(sizes, default=0), budget - resident + 1):
                ring = lay_out_ring(sizes, capacity)
                step_s = simulate(place_uses(loads, LINK, streamed, ring)).step_s
                if best is None or step_s < best:
                    best = step_s
    return best


small_loads = st.lists(
    st.builds(
        Load,
        nbytes=st.integers(1, 5),
        compute_s=st.integers(1, 6).map(float),
        is_movable=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(small_loads, st.integers(1, 25))
def test_small_problems_are_solved_nearly_as_well_as_by_trying_everything(loads, budget):
    best = exhaustive_best(loads, budget)
    if best is None:
        with pytest.raises(DoesNotFit) as error:
            choose_residency(loads, LINK, budget)
        assert error.value.needed_nbytes > budget
        return
    found = choose_residency(loads, LINK, budget)
    assert found.device_nbytes <= budget
    assert all(loads[i].is_movable for i in found.streamed)
    assert found.timeline.step_s <= 1.25 * best


@settings(max_examples=60, deadline=None)
@given(small_loads)
def test_the_smallest_need_is_exact(loads):
    need = smallest_need(loads)
    assert exhaustive_best(loads, need) is not None
    assert exhaustive_best(loads, need - 1) is None
    assert choose_residency(loads, LINK, need).device_nbytes <= need


@settings(max_examples=40, deadline=None)
@given(small_loads, st.integers(1, 25))
def test_the_bound_of_link_and_computation_is_never_undercut(loads, budget):
    try:
        found = choose_residency(loads, LINK, budget)
    except DoesNotFit:
        assume(False)
    copied = sum(load.nbytes for load, c in zip(loads, found.timeline.copied, strict=True) if c)
    compute_s = sum(load.compute_s for load in loads)
    assert found.timeline.step_s >= max(compute_s, copied) - 1e-6


def transformer(num_blocks, step_s):
    """Alternating small and large layers, computation in proportion to bytes."""
    sizes = [18, 18, 18, 1, 72, 72] * num_blocks
    return [Load(nbytes=256 * n, compute_s=step_s * n / sum(sizes)) for n in sizes]


def test_a_deep_transformer_comes_close_to_the_bound():
    loads = transformer(20, step_s=1.0)
    total = sum(load.nbytes for load in loads)
    link = Link(bytes_per_s=total / 2, overhead_s=0.0)
    found = choose_residency(loads, link, total // 3)
    moved = sum(loads[i].nbytes for i in found.streamed)
    assert found.timeline.step_s <= 1.03 * max(1.0, moved / link.bytes_per_s)
    assert moved <= total - total // 3 + 4 * max(load.nbytes for load in loads)


def test_streamed_blocks_are_spread_over_the_step():
    loads = transformer(20, step_s=1.0)
    total = sum(load.nbytes for load in loads)
    found = choose_residency(loads, Link(bytes_per_s=total, overhead_s=0.0), total // 2)
    halves = [sum(1 for i in found.streamed if (i < len(loads) // 2) is first) for first in (1, 0)]
    assert abs(halves[0] - halves[1]) <= 0.2 * sum(halves)


def test_what_cannot_move_stays_even_under_the_smallest_ring():
    loads = [Load(nbytes=512, compute_s=1.0, is_movable=i % 2 == 0) for i in range(8)]
    found = choose_residency(loads, LINK, 4096, keep_few=True)
    assert found.streamed == (0, 2, 4, 6)
    assert found.device_nbytes == 4 * 512 + 2 * 512

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddo.layout import lay_out_ring
from ddo.loads import Link, Load, place_uses
from ddo.residency import DoesNotFit, choose_residency, smallest_need
from ddo.search import Search
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
            for capacity in ring_sizes(sizes, budget - resident):
                ring = lay_out_ring(sizes, capacity)
                step_s = simulate(place_uses(loads, LINK, streamed, ring)).step_s
                if best is None or step_s < best:
                    best = step_s
    return best


def ring_sizes(sizes, room):
    """Every capacity up to `room` for which the laps differ from those of a larger one."""
    if not sizes and room >= 0:
        yield 0
    while sizes and room >= max(sizes):
        yield room
        room = lay_out_ring(sizes, room).nbytes - 1


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
def test_small_problems_are_solved_as_well_as_by_trying_everything(loads, budget):
    best = exhaustive_best(loads, budget)
    if best is None:
        with pytest.raises(DoesNotFit) as error:
            choose_residency(loads, LINK, budget)
        assert error.value.needed_nbytes > budget
        return
    found = choose_residency(loads, LINK, budget)
    assert found.device_nbytes <= budget
    assert all(loads[i].is_movable for i in found.streamed)
    assert found.timeline.step_s <= 1.001 * best


def problem(seed, num_blocks):
    """Blocks of which the link or the computation is the bottleneck, and a budget."""
    draw = random.Random(seed)
    largest = draw.choice([5, 20, 50])
    scale = draw.choice([0.05, 0.2, 0.4, 0.7, 1.0]) * largest / 5
    loads = [
        Load(
            nbytes=draw.randint(1, largest),
            compute_s=draw.randint(1, 6) * scale,
            is_movable=draw.random() < 0.8,
        )
        for _ in range(num_blocks)
    ]
    total = sum(load.nbytes for load in loads)
    return loads, draw.randint(total // 3, total)


@pytest.mark.parametrize("seed", range(40))
def test_spreads_and_exchanges_come_within_three_percent_of_trying_everything(seed):
    """What is done for many blocks, on problems that are small enough to try everything."""
    loads, budget = problem(seed, 8)
    best = exhaustive_best(loads, budget)
    search = Search(loads, LINK, budget)
    search.spread_over_rings()
    search.improve()
    assert (search.best is None) == (best is None)
    if best is not None:
        assert search.best.device_nbytes <= budget
        assert search.best.timeline.step_s <= 1.03 * best


@pytest.mark.parametrize("budget_share", [0.3, 0.5, 0.8])
def test_many_blocks_take_few_simulations(budget_share):
    """A simulation of 1,000 blocks takes 3 ms, and a session plans several times."""
    draw = random.Random(3)
    loads = [Load(nbytes=256 * draw.randint(1, 4000), compute_s=draw.random()) for _ in range(1000)]
    total = sum(load.nbytes for load in loads)
    compute_s = sum(load.compute_s for load in loads)
    link = Link(bytes_per_s=total / compute_s)
    found = choose_residency(loads, link, int(budget_share * total))
    assert found.num_simulated <= 20
    ideal = max(compute_s, (1 - budget_share) * total / link.bytes_per_s)
    assert found.timeline.step_s <= 1.03 * ideal


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

from __future__ import annotations

import pytest
import torch

from ddo.adapting import BY_ORDER, BY_TIMES, Change, Planner
from ddo.blocks import take_inventory
from ddo.profile import StepProfile
from ddo.settings import OffloadSettings


@pytest.fixture
def blocks():
    """Twelve layers of 4 KiB."""
    layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(12))
    return take_inventory(layers, torch.device("cpu")).blocks


def planner_of(blocks, budget=24 << 10, **settings):
    planner = Planner(OffloadSettings(preset="stream", **settings), budget, 1e9)
    planner.take(blocks)
    return planner


def seen(order, compute_s=None):
    return StepProfile(order=tuple(order), compute_s=compute_s, stall_s={}, step_s=None)


def test_each_further_try_of_a_step_gives_twice_as_much_back(blocks):
    planner = planner_of(blocks, budget=48 << 10)
    budgets = [planner.smaller(32 << 10, num_tries)[0] for num_tries in range(5)]
    assert budgets == [28 << 10, 24 << 10, 16 << 10, 16 << 10, 16 << 10]


def test_an_order_as_expected_changes_nothing(blocks):
    planner = planner_of(blocks)
    now = planner.make()
    found = planner.learn(now, seen(range(12)), trust_times=True)
    assert not isinstance(found, Change)
    assert [b.placement for b in found.blocks] == [b.placement for b in now.blocks]


def test_another_order_keeps_the_residents_and_moves_the_ring(blocks):
    planner = planner_of(blocks)
    now = planner.make()
    found = planner.learn(now, seen(reversed(range(12))), trust_times=True)
    assert isinstance(found, Change)
    assert found.reason == BY_ORDER
    assert [b.name for b in found.plan.blocks] == [b.name for b in reversed(now.blocks)]
    where = {b.name: b.placement for b in now.blocks}
    assert all(where[b.name] == b.placement for b in found.plan.blocks)
    assert found.plan.ring_bytes <= now.ring_bytes
    assert planner.uses == list(reversed(range(12)))


def test_blocks_that_a_step_left_out_keep_their_place_at_the_end(blocks):
    planner = planner_of(blocks)
    found = planner.learn(planner.make(), seen([3, 1, 3]), trust_times=True)
    assert {b.name for b in found.plan.blocks} == {b.name for b in blocks}
    assert planner.uses == [3, 1, 3]


def test_times_that_promise_a_shorter_step_change_what_stays(blocks):
    """All time is spent in the first two layers: what streams there is hidden, no matter what."""
    planner = planner_of(blocks)
    now = planner.make()
    times = {i: 40e-6 if i < 2 else 1e-7 for i in range(12)}
    once = planner.learn(now, seen(range(12), times), trust_times=True)
    assert not isinstance(once, Change)
    found = planner.learn(once, seen(range(12), times), trust_times=True)
    assert planner.knows_times
    plan = found.plan if isinstance(found, Change) else found
    assert plan.is_compute_measured
    assert plan.compute_s == pytest.approx(sum(times.values()))
    if isinstance(found, Change):
        assert found.reason == BY_TIMES


def test_a_pause_of_the_host_in_one_of_two_steps_does_not_count(blocks):
    planner = planner_of(blocks)
    paused = dict.fromkeys(range(12), 1e-6) | {4: 1.0}
    then = dict.fromkeys(range(12), 2e-6) | {4: 1e-6}
    plan = planner.learn(planner.make(), seen(range(12), paused), trust_times=True)
    found = planner.learn(plan, seen(range(12), then), trust_times=True)
    found = found.plan if isinstance(found, Change) else found
    assert found.compute_s == pytest.approx(12e-6)


def test_times_of_the_very_first_step_are_not_trusted(blocks):
    planner = planner_of(blocks)
    times = dict.fromkeys(range(12), 1.0)
    found = planner.learn(planner.make(), seen(range(12), times), trust_times=False)
    assert not found.is_compute_measured


def test_a_module_whose_order_never_settles_is_left_in_peace(blocks):
    planner = planner_of(blocks)
    now = planner.make()
    orders = [[k, *(i for i in range(12) if i != k)] for k in (5, 7, 9, 11, 3, 2)]
    found = [planner.learn(now, seen(order), trust_times=True) for order in orders]
    assert [isinstance(f, Change) for f in found] == [True] * 4 + [False] * 2


def test_a_smaller_plan_holds_less_until_there_is_none(blocks):
    planner = planner_of(blocks)
    held = planner.make().device_bytes
    while (smaller := planner.smaller(held)) is not None:
        planner.budget_bytes, plan = smaller
        assert plan.device_bytes < held
        held = plan.device_bytes
    assert held <= 2 * 4096

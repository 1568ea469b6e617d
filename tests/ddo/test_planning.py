from __future__ import annotations

import json
from itertools import pairwise

import pytest

from ddo.planning import BlockSpec, PlanError, plan
from ddo.settings import OffloadSettings
from ddo.sizes import MIB

SPECS = [BlockSpec(name=f"blocks.{i}", nbytes=8 * MIB, compute_weight=1.0) for i in range(24)]
RATE = 50e9


def make(budget_mib, *, specs=SPECS, compute_s=None, **settings):
    return plan(
        specs,
        OffloadSettings(**settings),
        weight_budget_bytes=budget_mib * MIB,
        link_bytes_per_s=RATE,
        compute_s=compute_s,
    )


def test_auto_keeps_all_weights_when_they_fit():
    found = make(192)
    assert found.mode == "resident"
    assert found.device_bytes == found.weight_bytes == 192 * MIB


def test_auto_streams_when_they_do_not_fit():
    found = make(100, compute_s=0.01)
    assert found.mode == "stream"
    assert found.device_bytes <= 100 * MIB
    assert found.streamed_bytes >= 92 * MIB
    assert found.step_s >= 0.999999 * found.bound_s
    assert found.bound_s == max(0.01, found.streamed_bytes / RATE)


def test_resident_fails_with_need_and_budget_when_weights_do_not_fit():
    with pytest.raises(PlanError, match=r"needs 192.0 MiB for weights, the budget leaves 100.0"):
        make(100, preset="resident")


def test_a_budget_below_the_smallest_ring_names_what_is_needed():
    with pytest.raises(PlanError, match=r"at least 8.0 MiB .* the budget leaves 7.0 MiB; raise"):
        make(7)
    assert make(8).device_bytes <= 8 * MIB


def test_low_memory_streams_everything_that_can_move():
    specs = [*SPECS, BlockSpec(name="table", nbytes=MIB, compute_weight=0, must_stay="a table")]
    found = make(150, specs=specs, preset="low_memory")
    assert found.device_bytes == 17 * MIB
    assert [b.name for b in found.blocks if b.placement == "device"] == ["table"]
    assert found.blocks[-1].reason == "a table"


def test_a_given_ring_is_not_exceeded():
    assert make(100, ring=20 * MIB).ring_bytes <= 20 * MIB


def test_off_plans_nothing():
    assert make(1, preset="off").mode == "off"


def test_every_block_has_a_place_and_a_reason_and_the_plan_is_json():
    found = make(100)
    assert all(b.reason and b.placement in ("device", "ring") for b in found.blocks)
    assert all((b.ring_offset is None) == (b.placement == "device") for b in found.blocks)
    document = json.loads(json.dumps(found.to_json()))
    assert document["schema"] == 1
    assert document["blocks"][0]["name"] == "blocks.0"
    assert any("assumed" in note for note in found.notes)


def test_the_same_question_gets_the_same_answer():
    assert make(100) == make(100)


def test_a_larger_budget_is_never_predicted_slower():
    steps = [make(budget, compute_s=0.002).step_s for budget in range(20, 190, 17)]
    assert all(later <= 1.03 * earlier for earlier, later in pairwise(steps))

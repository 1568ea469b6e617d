"""What a first step leaves of the device, and which blocks take it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ddo.lifecycle import OffloadSession
from ddo.planning import BlockSpec, plan
from ddo.settings import OffloadSettings
from ddo.sizes import GIB, MIB
from ddo.slack import Slack, choose_promoted
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.modules import IDS, make_net


@pytest.mark.parametrize(
    ("budget", "at_start", "now", "expected"),
    [
        (8 * GIB, 20 * GIB, 13 * GIB, GIB - 128 * MIB),  # 7 GiB are used of 8
        (8 * GIB, 8 * GIB, GIB // 2, 512 * MIB - 128 * MIB),  # the device ends before the budget
        (None, 10 * GIB, 2 * GIB, 2 * GIB - 160 * MIB),
        (8 * GIB, 20 * GIB, 12 * GIB + 100 * MIB, 0),  # not worth a change
        (8 * GIB, 20 * GIB, 11 * GIB, 0),  # more than the budget is used
        (8 * GIB, 8 * GIB, 9 * GIB, 8 * GIB + GIB - 128 * MIB),  # others have left the device
    ],
)
def test_slack_is_what_neither_the_budget_nor_the_device_has_used(budget, at_start, now, expected):
    assert Slack(budget, at_start).unused_bytes(now) == expected


def stream_plan(num_blocks=40, nbytes=10 * MIB, budget=200 * MIB):
    specs = [BlockSpec(name=f"b{i}", nbytes=nbytes, compute_weight=1) for i in range(num_blocks)]
    return plan(
        specs,
        OffloadSettings(preset="stream"),
        weight_budget_bytes=budget,
        link_bytes_per_s=50e9,
        compute_s=1e-3,
    )


def test_promoted_blocks_take_what_is_there_and_are_spread():
    now = stream_plan()
    streamed = [b.name for b in now.blocks if b.placement == "ring"]
    chosen = choose_promoted(now, 55 * MIB)
    assert len(chosen) == 5
    at = sorted(streamed.index(name) for name in chosen)
    gaps = [b - a for a, b in pairwise(at)]
    assert max(gaps) <= 2 * min(gaps)
    assert choose_promoted(now, 9 * MIB) == set()
    assert choose_promoted(now, 0) == ()


@pytest.mark.parametrize("preset", ["stream", "auto", "low_memory"])
def test_what_the_reserve_has_left_after_the_first_step_is_given_to_weights(tmp_path, preset):
    options = {"width": 512, "depth": 12}  # 6.3 MB a layer
    net = make_net(tmp_path, **options)
    expected = net(IDS)
    settings = OffloadSettings(preset=preset, device_budget=200 * MIB, reserve=170 * MIB)
    with torch.no_grad(), OffloadSession(net, settings, FakeBackend(3)) as session:
        before = session.plan
        for _ in range(4):
            assert torch.equal(net(IDS), expected)
        after, report = session.plan, session.report()
    if preset == "low_memory":
        assert "reserve was left" not in report.num_replans
        return
    assert report.num_replans["reserve was left"] == 1
    assert after.streamed_bytes < before.streamed_bytes
    assert after.device_bytes > before.device_bytes
    assert after.device_bytes <= 200 * MIB

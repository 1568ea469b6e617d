from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from ddo.metrics import Metrics
from ddo.planning import OffloadPlan
from ddo.profile import Recorder
from ddo.transfer import RingCounters


@dataclass
class Fence:
    device: Device
    at: float | None = None

    def is_complete(self):
        return self.at is not None and self.at <= self.device.done


class Device:
    """A device whose time is set by hand: `now` is what is enqueued, `done` what is finished."""

    name = "by hand"
    num_host_waits = 0

    def __init__(self):
        import torch

        self.device = torch.device("cpu")
        self.now = self.done = 0.0

    def fence(self, *, is_timed=False):
        return Fence(self)

    def record(self, fence):
        fence.at = self.now

    def elapsed_s(self, begin, end):
        return end.at - begin.at


def step(metrics, device, seconds, nbytes):
    metrics.begin_step(0)
    device.now += seconds
    metrics.end_step(nbytes)


def report(metrics, plan=None):
    plan = plan or OffloadPlan(mode="stream", blocks=(), link_bytes_per_s=100.0)
    return metrics.report(plan, "cpu", RingCounters(), own_memory_bytes=0, placed_weights=0)


def test_steps_are_measured_by_the_device_once_it_has_finished_them():
    device = Device()
    metrics = Metrics(backend=device)
    for seconds in (9.0, 2.0, 3.0, 2.0):
        step(metrics, device, seconds, 50)
    assert report(metrics).step_s is None
    device.done = 11.0
    assert report(metrics).first_step_s == 9.0
    assert report(metrics).step_s == 2.0
    device.done = 99.0
    found = report(metrics)
    assert (found.step_s, found.step_clock, found.copied_bytes_per_step) == (2.0, "device", 50)
    assert found.rate_bytes_per_s == pytest.approx(25.0)
    assert found.num_steps == 4


def test_a_change_of_the_plan_makes_earlier_steps_worthless():
    device = Device()
    metrics = Metrics(backend=device)
    step(metrics, device, 9.0, 50)
    metrics.replanned("order of use")
    step(metrics, device, 1.0, 50)
    device.done = 99.0
    assert report(metrics).step_s == 1.0
    assert report(metrics).num_replans == {"order of use": 1}


def test_overlap_is_the_share_of_copying_that_nobody_waited_for():
    device = Device()
    metrics = Metrics(backend=device)
    step(metrics, device, 2.0, 100)
    device.done = 99.0
    metrics.stall_s = {"a": 0.25, "b": 0.0}
    found = report(metrics)
    assert found.overlap == pytest.approx(0.75)
    assert found.stall_s == {"a": 0.25}


def test_fallbacks_are_counted_by_reason():
    metrics = Metrics()
    for reason in ("full", "full", "old"):
        metrics.fall_back("memory", reason)
    found = report(metrics).to_json()
    assert [(f["reason"], f["count"]) for f in found["fallbacks"]] == [("full", 2), ("old", 1)]
    assert json.loads(json.dumps(found))["schema"] == 1


def test_a_profile_tells_computation_from_waiting():
    device = Device()
    recorder = Recorder(device)
    device.now = 1.0
    recorder.reach(4)  # resident
    device.now = 3.0
    recorder.reach(7)
    device.now = 3.5  # waited for its copy
    recorder.begin()
    device.now = 7.5
    recorder.reach(4)
    device.now = 8.0
    assert recorder.harvest() is None
    recorder.end()
    assert recorder.harvest() is None, "the device has not come so far"
    device.done = 8.0
    profile = recorder.harvest()
    assert profile.order == (4, 7, 4)
    assert profile.compute_s == {4: 2.5, 7: 4.0}
    assert profile.stall_s == {7: 0.5}
    assert profile.step_s == 7.0

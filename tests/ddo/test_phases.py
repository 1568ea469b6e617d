from __future__ import annotations

import pytest

from ddo import phases as phases_module
from ddo.phases import Phases


class Clock:
    """Time that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(phases_module, "time", clock)
    return clock


def test_a_phase_leaves_out_the_phases_inside_of_it(clock):
    phases = Phases()
    with phases.phase("first_fill"):
        clock.now += 1
        with phases.phase("register"):
            clock.now += 2
            with phases.phase("plan"):
                clock.now += 4
        clock.now += 8
    assert phases.seconds == {"plan": 4, "register": 2, "first_fill": 9}


def test_a_phase_that_runs_twice_adds_up_until_setting_up_is_over(clock):
    phases = Phases()
    for _ in range(2):
        with phases.phase("plan"):
            clock.now += 3
    phases.close()
    with phases.phase("plan"):
        clock.now += 3
    assert phases.seconds == {"plan": 6}


def test_a_phase_that_fails_is_counted_and_leaves_nothing_open(clock):
    phases = Phases()
    with pytest.raises(ValueError, match="no"), phases.phase("build"):
        clock.now += 1
        raise ValueError("no")
    with phases.phase("plan"):
        clock.now += 2
    assert phases.seconds == {"build": 1, "plan": 2}

"""Pinning that fails, and pinning or unpinning twice, disturb nothing that comes later."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

import native
from native import TierOutcome
from tests.support.fake_driver import DeviceRig

MakeRig = Callable[..., DeviceRig]


def seen_by_the_device(rig: DeviceRig, source: native.HostSource) -> bytes:
    memory = rig.arena.reserve(rig.page)
    memory.commit()
    unit = native.Unit([(source, 0, rig.page, 0)])
    native.upload(memory, unit, rig.copies.handle).block_stream(rig.compute.handle)
    return rig.read(memory.address, rig.page).take()


def test_registering_twice_costs_once_and_releasing_twice_is_no_error(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    first = source.register_pages(0, rig.file_nbytes)
    used = rig.host_budget.used_bytes
    again = source.register_pages(0, rig.file_nbytes)
    assert (first.outcome, again.outcome) == (TierOutcome.COMPLETE, TierOutcome.COMPLETE)
    assert rig.host_budget.used_bytes == used == source.registered_bytes
    assert seen_by_the_device(rig, source) == rig.contents[: rig.page]
    source.release()
    source.release()
    assert rig.host_budget.used_bytes == 0
    assert seen_by_the_device(rig, source) == rig.contents[: rig.page]
    assert rig.violations() == []


def test_two_sources_of_one_file_are_pinned_apart(make_rig: MakeRig) -> None:
    rig = make_rig()
    one, other = rig.open(), rig.open()
    for source in (one, other):
        assert source.register_pages(0, rig.file_nbytes).outcome is TierOutcome.COMPLETE
    one.release()
    assert seen_by_the_device(rig, other) == rig.contents[: rig.page]
    assert rig.violations() == []


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 6, 7])
def test_a_failure_while_many_windows_are_registered_is_told_once(
    make_rig: MakeRig, nth: int
) -> None:
    """What was pinned before the failure stays, the rest goes unpinned, the next call works.

    Of the four calls that each window takes, the last one gives a context back; should that
    fail, the window is pinned all the same.
    """
    rig = make_rig()
    source = rig.open()
    rig.driver.inject_fault(nth, status=2)
    result = source.register_pages(0, rig.file_nbytes, window_bytes=rig.page)
    assert result.outcome is TierOutcome.REFUSED
    assert result.held_bytes == source.registered_bytes == (nth > 4) * rig.page
    rig.driver.inject_fault(0)
    assert seen_by_the_device(rig, source) == rig.contents[: rig.page]
    assert rig.violations() == []


@pytest.fixture
def little_locked_memory() -> Iterator[None]:
    """At most 64 KiB of locked memory, as many containers have it."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


@pytest.mark.usefixtures("little_locked_memory")
def test_a_small_limit_on_locked_memory_costs_at_most_the_pinning(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    result = source.register_pages(0, rig.file_nbytes)
    assert result.outcome in (TierOutcome.COMPLETE, TierOutcome.REFUSED)
    assert seen_by_the_device(rig, source) == rig.contents[: rig.page]
    assert rig.violations() == []

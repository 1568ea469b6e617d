"""Sessions over the native allocator with its fake driver, which keeps a clock of its own."""

from __future__ import annotations

import pytest
import torch

native = pytest.importorskip("native", reason="the native extension is not built")

from ddo.backend import NativeBackend  # noqa: E402 - after the skip
from tests.ddo.modules import assert_same, make_net, photograph, run  # noqa: E402
from tests.ddo.test_lifecycle import session_of  # noqa: E402

LIMIT = 1 << 26


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path)


@pytest.mark.parametrize("preset", ["auto", "stream", "low_memory"])
@pytest.mark.parametrize("seed", range(6))
def test_results_are_bit_equal_and_no_page_is_used_before_its_time(net, seed, preset):
    driver = native.FakeDriver(seed=seed, is_delayed=seed % 2 == 1)
    backend = NativeBackend(driver, torch.device("cpu"), limit_bytes=LIMIT, host_budget_bytes=LIMIT)
    expected, before = run(net), photograph(net)
    with session_of(net, backend, budget=14_000 + 900 * seed, preset=preset) as session:
        for _ in range(4):
            assert torch.equal(run(net), expected)
        assert session.plan.mode == "stream"
    assert driver.violations() == []
    assert_same(before, photograph(net))


def test_all_device_memory_and_pins_are_given_back(net):
    backend = NativeBackend(
        native.FakeDriver(), torch.device("cpu"), limit_bytes=LIMIT, host_budget_bytes=LIMIT
    )
    with session_of(net, backend):
        run(net)
        assert backend.arena.stats().used_bytes > 0
    backend.arena.collect()
    assert backend.arena.stats().used_bytes == 0
    backend.arena.close()


def test_times_by_the_clock_of_the_device_are_learned_and_reported(net):
    driver = native.FakeDriver(seed=1)
    backend = NativeBackend(driver, torch.device("cpu"), limit_bytes=LIMIT, host_budget_bytes=LIMIT)
    with session_of(net, backend, preset="low_memory", budget=20_000) as session:
        for _ in range(6):
            run(net)
        report = session.report()
    assert report.step_clock == "device"
    assert report.plan["is_compute_measured"]
    assert report.rate_bytes_per_s == pytest.approx(report.copied_bytes_per_step / report.step_s)
    assert report.backend == "native-fake"


def test_a_limit_below_the_plan_is_an_error_that_leaves_the_module_as_it_was(net):
    driver = native.FakeDriver()
    granularity = native.Device(driver).granularity
    backend = NativeBackend(
        driver, torch.device("cpu"), limit_bytes=granularity, host_budget_bytes=LIMIT
    )
    before = photograph(net)
    hog = backend.allocate(granularity)
    backend.free_bytes = lambda: LIMIT  # as if somebody took the memory after the question
    with pytest.raises(torch.OutOfMemoryError):
        session_of(net, backend).attach()
    assert_same(before, photograph(net))
    del hog

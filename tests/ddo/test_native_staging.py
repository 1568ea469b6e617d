"""Weights that go through the native library's pinned ring: on its fake driver, and on a GPU."""

from __future__ import annotations

import gc
import os

import pytest
import torch

native = pytest.importorskip("native", reason="the native extension is not built")

from ddo.backend import NativeBackend  # noqa: E402 - after the skip
from ddo.weight_files import SourceError  # noqa: E402
from tests.ddo.modules import assert_same, make_net, photograph, run  # noqa: E402
from tests.ddo.test_lifecycle import session_of  # noqa: E402
from tests.support.fake_driver import fake_driver  # noqa: E402

WIDTH = 40
BUDGET = 120_000  # of the device, for weights of 250 kB
LIMIT = 1 << 26
KIB = 1 << 10


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path, width=WIDTH)


@pytest.fixture
def make_backend():
    """Backends on fake drivers that must have seen nothing wrong."""
    drivers = []

    def make(host_budget, seed=0, **options):
        drivers.append(fake_driver(seed, **{"is_delayed": seed % 2 == 0} | options))
        return NativeBackend(
            drivers[-1],
            torch.device("cpu"),
            limit_bytes=LIMIT,
            host_budget_bytes=host_budget,
        )

    yield make
    gc.collect()
    for driver in drivers:
        driver.run_all()
        assert driver.violations() == []


@pytest.mark.parametrize(
    "refused", [(), ("has_read_only_registration",), ("has_host_registration",)]
)
@pytest.mark.parametrize("host_budget", [0, 40, 80, 160, 4000])
@pytest.mark.parametrize("seed", range(2))
def test_results_are_bit_equal_by_every_tier(net, make_backend, seed, host_budget, refused):
    """Invariants 2, 3 and 9."""
    expected, before = run(net), photograph(net)
    backend = make_backend(host_budget * KIB, seed, **dict.fromkeys(refused, False))
    with session_of(net, backend, budget=BUDGET) as session:
        for _ in range(4):
            assert torch.equal(run(net), expected)
        assert session.plan.mode == "stream"
        pins = session.report().pins
    assert pins["registered_bytes"] + pins["slab_bytes"] + pins["ring_bytes"] <= host_budget * KIB
    if host_budget in (40, 80):
        assert pins["staged_bytes"] > 0
    if "has_host_registration" in refused:
        assert pins["registered_bytes"] == pins["slab_bytes"] == 0
    if host_budget == 4000 and not refused:
        assert pins["staged_bytes"] == pins["pageable_bytes"] == 0
    assert_same(before, photograph(net))


def staged(net, make_backend, **options):
    """Everything streams, nothing is pinned but the ring."""
    backend = make_backend(40 * KIB, 1, has_host_registration=False)
    return backend, session_of(net, backend, budget=BUDGET, preset="low_memory", **options)


@pytest.mark.parametrize("how", ["cut", "written"])
def test_a_file_that_changes_while_it_streams_is_named_with_the_offset(tmp_path, make_backend, how):
    net = make_net(tmp_path, width=WIDTH)
    path = tmp_path / "model.safetensors"
    whole, before = path.read_bytes(), photograph(net)
    _, session = staged(net, make_backend, replan=False)
    with session:
        for _ in range(3):  # plans change at first, and copy from the mapping then
            run(net)
        if how == "cut":
            os.truncate(path, len(whole) // 2)
        else:
            os.utime(path, ns=(1, 1))
        with pytest.raises(SourceError, match=r"byte \d+.*model\.safetensors"):
            run(net)
        path.write_bytes(whole)  # else the module's own mapping has no bytes to compare
    assert_same(before, photograph(net))


def test_a_file_that_was_replaced_is_refused_before_it_is_read(tmp_path, make_backend):
    net = make_net(tmp_path, width=WIDTH)
    path = tmp_path / "model.safetensors"
    backend, session = staged(net, make_backend)
    pin = backend.pin

    def pin_then_replace(memories, **options):
        pin(memories, **options)
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").replace(path)

    backend.pin = pin_then_replace
    before = photograph(net)
    with pytest.raises(SourceError, match="changed since it was mapped"), session:
        run(net)
    assert_same(before, photograph(net))


def test_the_ring_and_all_device_memory_are_given_back(net, make_backend):
    backend, session = staged(net, make_backend)
    with session:
        run(net)
        assert native.live_objects()["staging"] == 1
        assert backend.pins.counters.ring_bytes > 0
    del session
    gc.collect()
    backend.arena.collect()
    assert backend.arena.stats().used_bytes == 0
    assert native.live_objects().get("staging", 0) == 0


def test_layers_in_another_order_than_expected_get_their_own_bytes(net, make_backend):
    twin = make_net(width=WIDTH)
    twin.load_state_dict({name: t.clone() for name, t in net.state_dict().items()})
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    _, session = staged(net, make_backend)
    with session, torch.no_grad():
        run(net)
        for order in ([5, 0, 3, 1, 4, 2], [0, 0, 2, 5, 5, 1]):
            for k in order:
                assert torch.equal(net.layers[k](x), twin.layers[k](x))
            run(net)

"""Weights that go through a pinned ring which reader threads refill."""

from __future__ import annotations

import _thread
import gc
import json
import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from safetensors.torch import save_file

from ddo.host_pins import PAGE, HostPins, spread
from ddo.host_sources import map_shared
from ddo.pin_counters import PinCounters
from ddo.staging import InFlight, staging_size
from ddo.weight_files import FileIdentity, SourceError
from tests.ddo.modules import assert_same, load_net, make_net, photograph, run
from tests.ddo.staged_backend import FakeRegistrar, StagedBackend
from tests.ddo.test_lifecycle import Programs, session_of

WIDTH = 40
BUDGET = 120_000  # of the device, for weights of 250 kB
KIB = 1 << 10


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path, width=WIDTH)


# ---- whole sessions ----


@pytest.mark.parametrize("registers_files", [True, False])
@pytest.mark.parametrize("host_budget", [0, 20, 40, 80, 160, 4000])
@pytest.mark.parametrize("seed", range(3))
def test_results_are_bit_equal_by_every_tier(net, seed, host_budget, registers_files):
    """Invariants 2, 3 and 9, with threads that come to their copies at times of their own."""
    expected, before = run(net), photograph(net)
    backend = StagedBackend(seed, host_budget=host_budget * KIB, registers_files=registers_files)
    with session_of(net, backend, budget=BUDGET) as session, backend.reading():
        for _ in range(4):
            assert torch.equal(run(net), expected)
        assert session.plan.mode == "stream"
        pins = session.report().pins
    held = pins["registered_bytes"] + pins["slab_bytes"] + pins["ring_bytes"]
    assert held <= host_budget * KIB
    if host_budget in (40, 80):
        assert pins["staged_bytes"] > 0
    if host_budget == 0:
        assert pins["pageable_bytes"] > 0
    if host_budget == 4000:
        assert pins["staged_bytes"] == pins["pageable_bytes"] == 0
    assert (pins["slab_bytes"] > 0) == (not registers_files and host_budget >= 20)
    assert_same(before, photograph(net))
    assert backend.registrar.pages == {}


def staged(net, seed=1, **options):
    backend = StagedBackend(seed, host_budget=40 * KIB, **options)
    return backend, session_of(net, backend, budget=BUDGET, preset="low_memory")


@pytest.mark.parametrize("how", ["cut", "written"])
def test_a_file_that_changes_while_it_streams_is_named_with_the_offset(tmp_path, how):
    """And detached, the module is as it was found."""
    (tmp_path / "copy").mkdir()
    net = make_net(tmp_path / "copy", width=WIDTH)
    path = tmp_path / "copy" / "model.safetensors"
    whole, before = path.read_bytes(), photograph(net)
    # Slabs are copies: to touch pages of a mapping that a file has lost is a bus error.
    _, session = staged(net, registers_files=False)
    with session:
        run(net)
        if how == "cut":
            os.truncate(path, len(whole) // 2 // PAGE * PAGE)
        else:
            os.utime(path, ns=(1, 1))
        with pytest.raises(SourceError, match=r"byte \d+.*model\.safetensors"):
            run(net)
        path.write_bytes(whole)  # else the module's own mapping has no bytes to compare
    assert_same(before, photograph(net))


def test_a_file_that_was_replaced_by_another_is_refused_before_it_is_read(tmp_path):
    net = make_net(tmp_path, width=WIDTH)
    path = tmp_path / "model.safetensors"
    backend, session = staged(net)
    pin = backend.pin

    def pin_then_replace(memories, **options):
        pin(memories, **options)
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").replace(path)

    backend.pin = pin_then_replace
    before = photograph(net)
    with pytest.raises(SourceError, match="changed before byte"), session:
        run(net)
    assert_same(before, photograph(net))


def test_detaching_waits_for_threads_that_are_still_reading(net):
    before = photograph(net)
    backend, session = staged(net)
    is_reading = threading.Event()

    def slowly():
        is_reading.set()
        time.sleep(0.002)

    with session:
        run(net)
        backend.gate = slowly
        is_reading.clear()
        run(net)
        assert is_reading.is_set()
    assert backend.registrar.pages == {}
    assert not [t for t in threading.enumerate() if t.name.startswith("ddo-reader")]
    assert_same(before, photograph(net))


@pytest.mark.parametrize("nth", [0, 3, 9])
def test_an_interrupt_while_waiting_for_a_thread_leaves_a_session_that_works(net, nth):
    expected, before = run(net), photograph(net)
    backend, session = staged(net)
    settle, calls = backend.in_flight.settle, []

    def interrupted(fence):
        calls.append(fence)
        if len(calls) == nth + 1:
            raise KeyboardInterrupt
        settle(fence)

    with session, backend.reading():
        run(net)
        backend.in_flight.settle = interrupted
        with pytest.raises(KeyboardInterrupt):
            run(net)
        for _ in range(3):
            assert torch.equal(run(net), expected)
    assert_same(before, photograph(net))


def test_a_file_that_changes_while_residents_are_read_leaves_the_module_as_it_was(tmp_path):
    net = make_net(tmp_path, width=WIDTH)
    before = photograph(net)
    backend = StagedBackend(1, host_budget=40 * KIB, registers_files=False)
    backend.gate = lambda: os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with pytest.raises(SourceError, match="changed before byte"):
        session_of(net, backend, budget=BUDGET).attach()
    gc.collect()  # the frames of the error
    assert backend.registrar.pages == {}
    assert backend.allocated_bytes() == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("ddo-reader")]
    assert_same(before, photograph(net))


def test_the_device_fills_out_of_one_file_while_the_next_is_registered(tmp_path):
    """Each file is one registration, and nothing waits between them."""
    net, folder = make_net(width=WIDTH), tmp_path / "sharded"
    folder.mkdir()
    save_sharded(net, folder)
    net = load_net(folder, width=WIDTH)
    expected = run(net)
    backend = StagedBackend(1, host_budget=4000 * KIB)
    events = []
    pin, submit, synchronize = backend.pin, backend.submit, backend.synchronize
    backend.pin = lambda *a, **k: (events.append("pin"), pin(*a, **k))
    backend.submit = lambda *a: (events.append("submit"), submit(*a))
    backend.synchronize = lambda fence: (events.append("wait"), synchronize(fence))
    with session_of(net, backend, budget=BUDGET) as session:
        first = events[: events.index("wait")]
        assert first.count("pin") >= 2
        assert "submit" in first[: len(first) - first[::-1].index("pin")]
        assert len(backend.registrar.pages) >= 2
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert session.plan.mode == "stream"


def save_sharded(net, folder):
    """The weights in two files with an index."""
    state = {k: v.contiguous() for k, v in net.state_dict().items() if k != "head.weight"}
    names = sorted(state)
    files = {name: f"model-0000{1 + (k % 2)}-of-00002.safetensors" for k, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: state[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_session_that_fails_to_attach_ends_its_threads(net):
    before = photograph(net)
    backend, session = staged(net)
    backend.fail_at["submit"] = 2
    with pytest.raises(RuntimeError, match="injected"):
        session.attach()
    assert not [t for t in threading.enumerate() if t.name.startswith("ddo-reader")]
    assert_same(before, photograph(net))


def test_layers_in_another_order_than_expected_get_their_own_bytes(net):
    """A copy that a thread has not come to must not land on what was fetched instead."""
    backend, session = staged(net)
    with session, backend.reading():
        run(net)
        for order in ([5, 0, 3, 1, 4, 2], [0, 0, 2, 5, 5, 1]):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                found = [net.layers[k](x) for k in order]
            reference = expected_layers(net, session, order, x)
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
            run(net)


def expected_layers(net, session, order, x):
    """What the layers give with weights that nobody moves."""
    twin = make_net(width=WIDTH)
    twin.load_state_dict({name: t.clone() for name, t in net.state_dict().items()})
    with torch.no_grad():
        return [twin.layers[k](x) for k in order]


@pytest.fixture
def interruptible():
    """What a shell starts in the background begins with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_while_a_disk_hangs_gets_through(net):
    """And what was being read arrives before the module is given back."""
    expected, before = run(net), photograph(net)
    backend, session = staged(net)
    inside, disk = [], threading.Event()

    def hang():
        inside.append(None)
        try:
            assert disk.wait(30)
        finally:
            inside.pop()

    def interrupt_when_somebody_waits(num_before):
        for _ in range(20_000):
            if inside and backend.pins.counters.num_staging_waits > num_before:
                _thread.interrupt_main()
                return
            time.sleep(0.001)

    with session, backend.reading():
        run(net)
        disk.set()
        backend.gate = hang
        run(net)  # what was read ahead is used up
        disk.clear()
        num_before = backend.pins.counters.num_staging_waits
        other = threading.Thread(target=interrupt_when_somebody_waits, args=(num_before,))
        try:
            with pytest.raises(KeyboardInterrupt):
                other.start()  # it may interrupt at once
                for _ in range(3):
                    run(net)
        finally:
            disk.set()
            other.join()
        for _ in range(3):
            assert torch.equal(run(net), expected)
    assert_same(before, photograph(net))


class StagedPrograms(Programs):
    """The same programs, with a host budget that holds a part, and interrupts while waiting."""

    width = 48
    backend = None

    def make_backend(self, seed):
        self.backend = StagedBackend(
            seed, host_budget=32 * KIB + seed * 512, registers_files=seed % 2 == 0
        )
        return self.backend

    @precondition(lambda self: self.session is not None)
    @rule(nth=st.integers(0, 12))
    def interrupt_a_wait(self, nth):
        settle, calls = self.backend.in_flight.settle, []

        def interrupted(fence):
            calls.append(fence)
            if len(calls) == nth + 1:
                raise KeyboardInterrupt
            settle(fence)

        self.backend.in_flight.settle = interrupted
        try:
            with suppress(KeyboardInterrupt):
                run(self.net)
        finally:
            self.backend.in_flight.settle = settle

    def teardown(self):
        super().teardown()
        assert not [t for t in threading.enumerate() if t.name.startswith("ddo-reader")]


StagedPrograms.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestStagedPrograms = StagedPrograms.TestCase


# ---- the parts ----


def mapped_file(path, nbytes):
    path.write_bytes(os.urandom(nbytes))
    memory = map_shared(path, FileIdentity.of(path))
    assert memory is not None
    return memory


def test_what_is_pinned_in_part_is_spread_over_the_order_of_use(tmp_path):
    """A run of slow bytes would empty the ring on the device."""
    memory = mapped_file(tmp_path / "w", 16 << 20)
    memories = list(memory.split(1 << 20))
    memories.reverse()
    for share in (0.25, 0.5, 0.75):
        chosen = list(spread(memories, int(share * memory.numel())))
        assert sum(part.numel() for part in chosen) <= share * memory.numel()
        for whole in memories:
            begin, end = whole.data_ptr(), whole.data_ptr() + whole.numel()
            inside = sum(p.numel() for p in chosen if begin <= p.data_ptr() < end)
            assert inside == pytest.approx(share * whole.numel(), rel=0.02)
    assert list(spread(memories, 0)) == []
    assert sum(p.numel() for p in spread(memories, 99 << 20)) == memory.numel()


class Stager:
    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_ring_takes_part_of_the_budget_and_the_rest_is_registered(tmp_path, share):
    memory = mapped_file(tmp_path / "w", 16 << 20)
    opened = []

    def open_stager(size):
        opened.append(size)
        return Stager()

    registrar = FakeRegistrar()
    pins = HostPins(registrar, int(share * memory.numel()), open_stager)
    pins.pin(list(memory.split(1 << 20)))
    counters = pins.counters
    assert counters.ring_bytes == opened[0].nbytes <= share * memory.numel() / 4
    pinned = counters.registered_bytes + counters.ring_bytes
    assert 0.95 * share * memory.numel() <= pinned <= share * memory.numel()
    assert counters.staged_bytes == memory.numel() - counters.registered_bytes
    assert counters.pageable_bytes == 0
    pieces = pins.pieces(memory)
    assert torch.equal(torch.cat([piece.memory for piece in pieces]), memory)
    assert sum(p.memory.numel() for p in pieces if not p.is_pinned) == counters.staged_bytes
    offset = 0
    for piece in pieces:
        if not piece.is_pinned:
            assert (piece.file.path, piece.file.offset) == (str(tmp_path / "w"), offset)
        offset += piece.memory.numel()
    stager = pins.stager
    pins.close()
    assert stager.is_closed
    assert registrar.pages == {}


def test_what_a_new_plan_does_not_stream_makes_room(tmp_path):
    """Else the pinned share would fall with each change of the plan."""
    memory = mapped_file(tmp_path / "w", 16 << 20)
    parts = list(memory.split(1 << 20))
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 4 << 20, lambda size: Stager())
    pins.pin(parts[:8])
    held = pins.counters.registered_bytes
    assert held > 2.5 * (1 << 20)
    pins.pin(parts[8:], keep=parts[:8])
    assert pins.counters.registered_bytes <= held + pins.left_bytes + PAGE
    assert sum(p.is_pinned for p in pins.pieces(memory[: 8 << 20])) > 0
    pins.pin(parts[4:12])
    counters = pins.counters
    inside = sum(p.memory.numel() for p in pins.pieces(memory[4 << 20 : 12 << 20]) if p.is_pinned)
    assert inside == counters.registered_bytes > 0.95 * held
    assert counters.staged_bytes == (8 << 20) - inside
    assert counters.registered_bytes == sum(registrar.pages.values())
    for part in parts[4:12]:
        pinned = sum(p.memory.numel() for p in pins.pieces(part) if p.is_pinned)
        assert 0 < pinned < part.numel()
    pins.close()
    assert registrar.pages == {}


def test_slabs_of_what_is_not_wanted_any_more_make_room_too():
    memory = torch.arange(64 * PAGE, dtype=torch.int64).to(torch.uint8)
    registrar = FakeRegistrar(registers_files=False)
    registrar.files.append((memory.data_ptr() // PAGE * PAGE, memory.data_ptr() + memory.numel()))
    pins = HostPins(registrar, 24 * PAGE)
    pins.pin([memory[: 20 * PAGE]])
    assert pins.counters.slab_bytes == 20 * PAGE
    pins.pin([memory[40 * PAGE : 60 * PAGE]])
    assert pins.counters.slab_bytes == 20 * PAGE
    assert not any(p.is_pinned for p in pins.pieces(memory[: 20 * PAGE]))
    assert torch.equal(torch.cat([piece.memory for piece in pins.pieces(memory)]), memory)
    pins.close()
    assert registrar.pages == {}


def test_a_budget_that_holds_everything_opens_no_ring(tmp_path):
    memory = mapped_file(tmp_path / "w", 1 << 20)
    pins = HostPins(FakeRegistrar(), 1 << 20, lambda size: pytest.fail("opened"))
    pins.pin([memory])
    assert pins.counters.registered_bytes == 1 << 20
    pins.close()


def test_a_ring_that_the_device_refuses_is_asked_for_once_and_bytes_stay_pageable(tmp_path):
    memory = mapped_file(tmp_path / "w", 1 << 20)
    asked = []
    pins = HostPins(FakeRegistrar(), 1 << 19, asked.append)
    pins.pin([memory])
    pins.pin([memory])
    assert len(asked) == 1
    assert pins.counters.ring_bytes == 0
    assert pins.counters.num_refused == 1
    assert pins.counters.pageable_bytes == memory.numel() - pins.counters.registered_bytes
    pins.close()


@pytest.mark.parametrize("left", [0, 4095, 1 << 16, 1 << 22, 1 << 30, 1 << 40])
@pytest.mark.parametrize("cores", [1, 2, 16, 128])
def test_a_ring_takes_at_most_a_quarter_and_keeps_its_threads_busy(left, cores):
    size = staging_size(left, cores)
    if size is None:
        assert left < 4 * 2 * 4096
        return
    assert size.nbytes <= left // 4
    assert size.num_buffers >= size.num_threads >= (2 if left > 1 << 16 else 1)
    assert size.buffer_bytes % 4096 == 0
    assert size.nbytes <= 64 << 20


class Transfer:
    """On its way until told otherwise."""

    def __init__(self):
        self.is_over = False
        self.failure = None
        self.num_asked = 0

    def wait(self, timeout_s):
        self.num_asked += 1
        if self.num_asked == 3:
            self.is_over = True
        if self.failure is not None:
            raise self.failure
        return self.is_over


@pytest.fixture
def flights():
    return InFlight(PinCounters(), (ValueError,))


def test_who_waits_for_a_fence_waits_for_its_threads_first(flights):
    memory, transfer, fence = torch.zeros(100, dtype=torch.uint8), Transfer(), object()
    flights.add(fence, memory, transfer, None)
    flights.settle(object())
    assert transfer.num_asked == 0
    flights.settle(fence)
    assert transfer.is_over
    assert flights._counters.num_staging_waits == 1
    flights.settle(fence)
    assert transfer.num_asked == 3, "it was forgotten"


def test_a_copy_waits_for_threads_that_would_write_to_the_same_place_later(flights):
    memory = torch.zeros(100, dtype=torch.uint8)
    transfers = [Transfer() for _ in range(4)]
    for k, transfer in enumerate(transfers):
        flights.add(object(), memory[k * 20 : k * 20 + 20], transfer, None)
    flights.clear_way(memory[39:60])
    assert [t.is_over for t in transfers] == [False, True, True, False]
    flights.close()
    assert all(t.is_over for t in transfers)


def test_a_read_that_failed_is_an_error_of_the_source_and_is_told_once(flights):
    memory, transfer, fence = torch.zeros(10, dtype=torch.uint8), Transfer(), object()
    transfer.failure = ValueError("file x at byte 7")
    flights.add(fence, memory, transfer, None)
    with pytest.raises(SourceError, match="file x at byte 7"):
        flights.settle(fence)
    flights.settle(fence)
    flights.add(fence, memory, transfer, None)
    flights.clear_way(memory)
    flights.settle(fence)


def test_a_later_net_of_the_same_file_is_staged_from_it(tmp_path):
    """The fallback of copying from memory is for weights that no file backs."""
    make_net(tmp_path, width=WIDTH)
    net = load_net(tmp_path, width=WIDTH)
    backend, session = staged(net)
    with session:
        pieces = [
            piece
            for memory in backend.pinned
            for piece in backend.pins.pieces(memory)
            if not piece.is_pinned
        ]
        assert pieces
        assert all(piece.file is not None for piece in pieces)

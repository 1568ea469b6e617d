from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest
import torch

from ddo.layout import lay_out_ring
from ddo.simulate import Use, simulate
from ddo.transfer import HostCopy, Ring, RingBlock, TransferError
from tests.ddo.fake_backend import FakeBackend, OrderViolation


def content(index, nbytes):
    return (torch.arange(nbytes) * (index + 3) + index).to(torch.uint8)


def make_ring(backend, sizes, capacity, order=None):
    layout = lay_out_ring(sizes, capacity)
    memory = backend.allocate(layout.nbytes)
    blocks = []
    for index, (size, begin) in enumerate(zip(sizes, layout.offsets, strict=True)):
        data, cut = content(index, size), size // 3
        copies = [HostCopy(data[cut:], cut), *([HostCopy(data[:cut], 0)] if cut else [])]
        blocks.append(RingBlock(nbytes=size, begin=begin, copies=copies))
    return Ring(backend, memory, blocks, range(len(sizes)) if order is None else order)


def use(ring, backend, index, size):
    """What a layer does: take the block, read it, give it back."""
    view = ring.acquire(index)
    backend.read(view)
    assert torch.equal(view[:size], content(index, size)), f"block {index} has other bytes"
    ring.release(index)


SIZES = [5, 9, 3, 8, 8, 2, 7, 6, 4]


@pytest.mark.parametrize("capacity", [9, 12, 18, 30, 52])
@pytest.mark.parametrize("seed", range(8))
def test_steps_see_their_blocks_whatever_the_timing(seed, capacity):
    """Invariants 2 and 3, without a wait of the host."""
    backend = FakeBackend(seed)
    ring = make_ring(backend, SIZES, capacity)
    for _ in range(5):
        for index, size in enumerate(SIZES):
            use(ring, backend, index, size)
    assert ring.counters.num_missed <= (len(SIZES) if capacity < 18 else 1)
    assert backend.num_host_waits == 0


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_use_sees_the_right_bytes(seed):
    """Skipped, repeated, reordered, nested uses and broken-off steps."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 10))]
    backend = FakeBackend(seed)
    ring = make_ring(backend, sizes, draw.randint(max(sizes), sum(sizes)))
    for _ in range(80):
        index = draw.randrange(len(sizes)) if draw.random() < 0.4 else ring._cursor
        if draw.random() < 0.2:
            ring.acquire(index)
            for inner in draw.sample(range(len(sizes)), min(3, len(sizes))):
                use(ring, backend, inner, sizes[inner])
            ring.release(index)
        use(ring, backend, index, sizes[index])
        if draw.random() < 0.05:
            ring.begin_step()
        if draw.random() < 0.03:
            ring.drain()


def test_blocks_are_copied_once_per_step_and_none_is_waited_for_in_its_turn():
    backend = FakeBackend(0)
    ring = make_ring(backend, [8] * 12, 32)
    ring.prefetch()
    for _ in range(4):
        for index in range(12):
            use(ring, backend, index, 8)
    assert ring.counters.num_missed == ring.counters.num_reordered == 0
    assert ring.counters.num_copies == 4 * 12 + 4  # four blocks of the next step are there


def test_a_block_that_comes_twice_in_a_step_is_expected_twice():
    backend = FakeBackend(0)
    ring = make_ring(backend, [8] * 6, 24, order=[0, 1, 2, 0, 3, 4, 5])
    for _ in range(3):
        for index in (0, 1, 2, 0, 3, 4, 5):
            use(ring, backend, index, 8)
    assert ring.counters.num_reordered == 0
    assert ring.counters.num_missed <= 1


def test_a_block_in_use_is_not_overwritten_by_one_that_shares_its_place():
    backend = FakeBackend(0)
    ring = make_ring(backend, [8, 8], 8)
    view = ring.acquire(0)
    use(ring, backend, 1, 8)
    assert torch.equal(view, content(0, 8))
    assert ring.counters.num_spilled == 1
    ring.release(0)
    assert backend.allocated_bytes() == 8


def test_two_threads_may_use_the_ring_at_once():
    backend = FakeBackend(3)
    ring = make_ring(backend, SIZES, 20)
    failures = []

    def work(start):
        try:
            for k in range(120):
                index = (start + k) % len(SIZES)
                use(ring, backend, index, SIZES[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_abandon_releases_what_an_interrupt_left_in_use():
    backend = FakeBackend(0)
    ring = make_ring(backend, [8] * 4, 16)
    ring.acquire(2)
    ring.acquire(2)
    assert ring.abandon() == [2]
    for index in range(4):
        use(ring, backend, index, 8)


def test_a_failed_copy_leaves_the_block_unloaded():
    backend = FakeBackend(0)
    ring = make_ring(backend, [8] * 4, 16)
    backend.fail_at["submit"] = 0
    with pytest.raises(RuntimeError, match="injected failure of submit"):
        ring.acquire(0)
    use(ring, backend, 0, 8)


def test_release_without_acquire_is_refused():
    ring = make_ring(FakeBackend(0), [8, 8], 16)
    with pytest.raises(TransferError, match="ring block 1 is released but nobody acquired it"):
        ring.release(1)


def test_a_block_outside_of_ring_or_order_is_refused():
    backend = FakeBackend(0)
    blocks = [RingBlock(nbytes=8, begin=4, copies=[])]
    with pytest.raises(TransferError, match="ends at byte 12, the ring has 8 bytes"):
        Ring(backend, backend.allocate(8), blocks, [0])
    with pytest.raises(TransferError, match="not in the order of use"):
        Ring(backend, backend.allocate(8), [RingBlock(nbytes=8, begin=0, copies=[])], [])


class DeafToReaders(FakeBackend):
    """Copies that do not wait for the readers of their place."""

    def submit(self, prepared, after, ready):
        super().submit(prepared, [], ready)


class DeafToCopies(FakeBackend):
    """Computation that does not wait for its copies."""

    def wait(self, fence):
        pass


@pytest.mark.parametrize("broken", [DeafToReaders, DeafToCopies])
@pytest.mark.parametrize("seed", range(4))
def test_the_fake_device_notices_a_missing_fence(broken, seed):
    """Otherwise these tests would prove nothing."""
    backend = broken(seed)
    ring = make_ring(backend, [8] * 4, 16)
    with pytest.raises((OrderViolation, AssertionError)):
        for index in (0, 1, 2, 3, 0, 1):
            use(ring, backend, index, 8)


@dataclass
class Time:
    at: float = 0.0

    def is_complete(self):
        return True


class ClockBackend(FakeBackend):
    """A device that only keeps time: one second per byte copied."""

    def __init__(self):
        super().__init__(0)
        self.copying = self.computing = 0.0

    def submit(self, prepared, after, ready):
        start = max([self.copying, *(fence.at for fence in after)])
        self.copying = start + sum(target.numel() for _, target in prepared)
        ready.at = self.copying

    def fence(self, *, is_timed=False):
        return Time()

    def record(self, fence):
        fence.at = self.computing

    def wait(self, fence):
        self.computing = max(self.computing, fence.at)


@pytest.mark.parametrize("seed", range(30))
def test_the_ring_keeps_the_rhythm_that_the_planner_simulates(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(2, 14))]
    times = [float(draw.randint(1, 12)) for _ in sizes]
    backend = ClockBackend()
    layout = lay_out_ring(sizes, draw.randint(max(sizes), sum(sizes)))
    ring = make_ring(backend, sizes, layout.nbytes)
    ends = []
    for _ in range(48):
        for index, seconds in enumerate(times):
            ring.acquire(index)
            backend.computing += seconds
            ring.release(index)
        ends.append(backend.computing)
    uses = [
        Use(seconds, float(size), begin, begin + size)
        for seconds, size, begin in zip(times, sizes, layout.offsets, strict=True)
    ]
    assert (ends[-1] - ends[-25]) / 24 == pytest.approx(simulate(uses).step_s, rel=0.01)


class HostClockBackend(ClockBackend):
    """No copy begins before the host has asked for it."""

    def __init__(self):
        super().__init__()
        self.host = 0.0

    def submit(self, prepared, after, ready):
        self.copying = max(self.copying, self.host)
        super().submit(prepared, after, ready)


def steps_of_a_caller_that_waits_for_the_device(sizes, times, layout, num_ahead):
    """Seconds a step; between two steps the host waits for computation and copies, then works."""
    backend = HostClockBackend()
    ring = make_ring(backend, sizes, layout.nbytes)
    ring.num_ahead = num_ahead
    ends = []
    for _ in range(30):
        ring.begin_step()
        backend.computing = backend.host + 60
        for index, seconds in enumerate(times):
            ring.acquire(index)
            backend.computing += seconds
            ring.release(index)
        backend.host = max(backend.computing, backend.copying)
        ends.append(backend.host)
    assert not ring.counters.num_missed
    return (ends[-1] - ends[-13]) / 12


@pytest.mark.parametrize("copy_share", [0.7, 0.95, 1.05, 1.3])
def test_a_caller_that_waits_for_the_device_waits_for_fewer_copies(copy_share):
    lost_before = lost = 0.0
    for seed in range(8):
        draw = random.Random(seed)
        sizes = [draw.choice([60, 80, 160]) for _ in range(60)]
        compute_s = sum(sizes) / copy_share / len(sizes)
        times = [compute_s * draw.uniform(0.7, 1.3) for _ in sizes]
        layout = lay_out_ring(sizes, draw.randint(3, 16) * 80)
        uses = [
            Use(seconds, float(size), begin, begin + size)
            for seconds, size, begin in zip(times, sizes, layout.offsets, strict=True)
        ]
        bound_s = max(sum(sizes), sum(times)) + 60
        before_s = steps_of_a_caller_that_waits_for_the_device(sizes, times, layout, None)
        num_ahead = simulate(uses).num_ahead
        step_s = steps_of_a_caller_that_waits_for_the_device(sizes, times, layout, num_ahead)
        assert step_s <= before_s
        lost_before += before_s - bound_s
        lost += step_s - bound_s
    assert lost < 0.6 * lost_before


def test_a_step_that_goes_round_twice_copies_on():
    """Without a word of a new step the ring still fetches all that is asked for."""
    ring = make_ring(FakeBackend(0), [4, 4, 4, 4], 8)
    ring.num_ahead = 0
    ring.begin_step()
    for index in [*range(4)] * 3:
        ring.acquire(index)
        ring.release(index)
    assert ring.counters.num_copies == 12

"""Random programs over arena and ring on the fake device, with a dictionary as the model.

Completions come late and in an order drawn from the seed, and now and then a driver call fails.
`NATIVE_PROGRAMS` sets the number of programs of each kind; CI runs a thousand in all, and
the C++ tests another thousand.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import native
from native import Hold, RangeState
from tests.support.fake_driver import DeviceRig, fake_driver

NUM_PROGRAMS = int(os.environ.get("NATIVE_PROGRAMS", "500"))
PROGRAM_SETTINGS = settings(
    max_examples=NUM_PROGRAMS,
    stateful_step_count=20,
    deadline=None,
    database=None,
    derandomize=True,  # CI shows the same failure twice; the longer run takes another profile
    suppress_health_check=list(HealthCheck),
)
FILE = Path(tempfile.gettempdir()) / f"native-programs-{os.getpid()}.bin"


class Program(RuleBasedStateMachine):
    """What both kinds share: a device, time that passes, failures, and a clean end."""

    def __init__(self) -> None:
        super().__init__()
        self.rig: Any = None
        self.waiting: list[tuple[native.Readback, bytes]] = []

    def start(self, seed: int) -> None:
        self.rig = DeviceRig(fake_driver(seed), FILE, file_nbytes=100_000)
        self.driver = self.rig.driver
        self.source = self.rig.open()

    @rule(steps=st.integers(1, 8))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.advance()

    @rule(nth=st.integers(1, 12), status=st.sampled_from([1, 2, 999]))
    def a_call_will_fail(self, nth: int, status: int) -> None:
        self.driver.inject_fault(nth, status)

    @rule(offset=st.integers(0, 60_000), nbytes=st.integers(1, 40_000))
    def pages_are_registered(self, offset: int, nbytes: int) -> None:
        result = self.source.register_pages(offset, nbytes, window_bytes=16_384)
        assert 0 <= result.held_bytes <= nbytes

    @rule()
    def the_source_lets_go(self) -> None:
        self.source.release()

    def attempt(self, call: Any, *arguments: Any) -> Any:
        """Once more after a failure: everything must be as it was before it."""
        try:
            return call(*arguments)
        except native.CudaError:
            assert self.driver.fault_was_delivered
            return call(*arguments)

    def expect(self, address: int, nbytes: int, offset: int) -> None:
        readback = self.attempt(self.rig.read, address, nbytes)
        self.waiting.append((readback, self.rig.contents[offset : offset + nbytes]))
        if len(self.waiting) > 5:
            self.settle()

    def settle(self) -> None:
        readback, expected = self.waiting.pop(0)
        assert self.attempt(readback.take) == expected

    @invariant()
    def nothing_illegal_was_seen(self) -> None:
        if self.rig is not None:
            assert self.rig.violations() == []

    def teardown(self) -> None:
        if self.rig is None:
            return
        self.driver.inject_fault(0)
        while self.waiting:
            self.settle()
        self.finish()
        self.rig.arena.close()
        del self.source
        assert self.rig.arena.stats().used_bytes == 0
        self.rig.copies.synchronize()
        assert self.rig.violations() == []
        driver = self.driver
        self.rig = None
        left = {name: n for name, n in driver.driver_objects().items() if n}
        left.pop("contexts", None)  # the bundles' retired ranges hold the device
        assert left == {}

    def finish(self) -> None:
        raise NotImplementedError


class ArenaProgram(Program):
    """Reserve, commit, fill, read, export, demote, retire and drop ranges under a limit."""

    ranges: Bundle[Any] = Bundle("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, tuple[Any, int | None]] = {}  # range and file offset of contents
        self.views: list[Any] = []

    @initialize(seed=st.integers(0, 2**32))
    def open(self, seed: int) -> None:
        self.start(seed)

    @rule(
        target=ranges,
        nbytes=st.one_of(st.integers(1, 3000), st.integers(1, 99_000)),
        alignment=st.sampled_from([1, 256, 1024, 65_536]),
    )
    def reserve(self, nbytes: int, alignment: int) -> Any:
        memory = self.attempt(lambda: self.rig.arena.reserve(nbytes, alignment=alignment))
        assert memory.address % max(alignment, 256) == 0
        self.model[memory.id] = (memory, None)
        return memory

    @rule(memory=ranges)
    def commit(self, memory: Any) -> None:
        if memory.state is RangeState.RESERVED:
            self.model[memory.id] = (memory, None)
        try:
            self.attempt(memory.commit)
        except native.OutOfMemoryError as error:
            assert error.requested_bytes > error.free_bytes or self.driver.fault_was_delivered
            return
        assert memory.state is RangeState.COMMITTED

    @rule(memory=ranges, offset=st.integers(0, 1000))
    def fill(self, memory: Any, offset: int) -> None:
        if memory.state is not RangeState.COMMITTED:
            return
        self.model[memory.id] = (memory, None)
        order = self.attempt(native.EventFence, self.rig.device)
        self.attempt(order.record, self.rig.compute.handle)
        self.attempt(order.block_stream, self.rig.copies.handle)
        unit = native.Unit([(self.source, offset, memory.nbytes, 0)])
        done = self.attempt(native.upload, memory, unit, self.rig.copies.handle)
        self.attempt(done.block_stream, self.rig.compute.handle)
        self.model[memory.id] = (memory, offset)

    @rule(memory=ranges)
    def read(self, memory: Any) -> None:
        if not memory.acquire():
            return
        _, offset = self.model[memory.id]
        if offset is not None:
            self.expect(memory.address, memory.nbytes, offset)
        self.attempt(memory.release, self.rig.compute.handle)

    @rule(memory=ranges, hold=st.sampled_from(Hold))
    def export(self, memory: Any, hold: Hold) -> None:
        if memory.state is RangeState.COMMITTED:
            self.views.append(memory.export(hold=hold))

    @precondition(lambda self: self.views)
    @rule(index=st.integers(0, 1000))
    def drop_view(self, index: int) -> None:
        del self.views[index % len(self.views)]

    @rule(memory=ranges)
    def demote(self, memory: Any) -> None:
        memory.demote()

    @rule(memory=ranges, order=st.one_of(st.none(), st.integers(0, 3)))
    def order(self, memory: Any, order: int | None) -> None:
        memory.set_demotion_order(order)

    @rule(memory=consumes(ranges))
    def retire(self, memory: Any) -> None:
        memory.retire()
        del self.model[memory.id]

    @rule(target=ranges, memory=consumes(ranges))
    def drop(self, memory: Any) -> Any:
        del self.model[memory.id]
        return multiple()

    @rule()
    def collect(self) -> None:
        self.rig.arena.collect()

    @invariant()
    def the_limit_holds_and_nothing_overlaps(self) -> None:
        if self.rig is None:
            return
        stats = self.rig.arena.stats()
        assert stats.used_bytes <= stats.peak_bytes <= stats.limit_bytes
        end = 0
        for address, nbytes in sorted((m.address, m.nbytes) for m, _ in self.model.values()):
            assert address >= end
            end = address + nbytes

    def finish(self) -> None:
        self.views.clear()
        self.model.clear()


class RingProgram(Program):
    """Submit, acquire, read, release and cancel units in a ring of few slots."""

    tickets: Bundle[Any] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[int, int]] = {}  # acquired ticket -> file offset, bytes

    @initialize(seed=st.integers(0, 2**32), num_slots=st.integers(1, 3))
    def open(self, seed: int, num_slots: int) -> None:
        self.start(seed)
        self.ring = native.TransferRing(
            self.rig.arena,
            num_slots=num_slots,
            slot_nbytes=30_000,
            copy_stream=self.rig.copies.handle,
            timing_interval=2,
        )

    @rule(
        target=tickets,
        offset=st.integers(0, 70_000),
        nbytes=st.integers(2, 30_000),
        cut=st.integers(1, 29_999),
    )
    def submit(self, offset: int, nbytes: int, cut: int) -> Any:
        cut = min(cut, nbytes - 1)
        unit = native.Unit(
            [(self.source, offset + cut, nbytes - cut, cut), (self.source, offset, cut, 0)]
        )
        ticket = self.attempt(self.ring.try_submit, unit)
        if ticket is None:
            assert len({self.ring.slot_of(t) for t in self.current()}) == self.ring.num_slots
            return multiple()
        return (ticket, offset, nbytes)

    def current(self) -> list[int]:
        return [t for t in self.submitted if self.ring.is_current(t)]

    @property
    def submitted(self) -> list[int]:
        return [entry[0] for entry in self._tickets()]

    def _tickets(self) -> list[Any]:
        return [self.names_to_values[r.name] for r in self.bundle("tickets")]

    @rule(entry=tickets)
    def acquire_and_read(self, entry: Any) -> None:
        ticket, offset, nbytes = entry
        if not self.ring.is_current(ticket):
            return
        self.attempt(self.ring.acquire, ticket, self.rig.compute.handle)
        self.held[ticket] = (offset, nbytes)
        self.expect(self.ring.slot_address(self.ring.slot_of(ticket)), nbytes, offset)
        if nbytes % 3:  # the others stay acquired for a while
            self.release(entry)

    @rule(entry=tickets)
    def release(self, entry: Any) -> None:
        ticket = entry[0]
        while ticket in self.held:
            try:
                self.attempt(self.ring.release, ticket, self.rig.compute.handle)
            except native.StateError:
                del self.held[ticket]

    @rule(entry=tickets)
    def cancel(self, entry: Any) -> None:
        ticket = entry[0]
        if self.ring.is_current(ticket) and ticket not in self.held:
            self.ring.cancel(ticket)
            assert not self.ring.is_current(ticket)

    @invariant()
    def held_units_stay_in_their_slots(self) -> None:
        for ticket in self.held:
            assert self.ring.is_current(ticket)

    def finish(self) -> None:
        for ticket in list(self.held):
            self.release((ticket,))
        self.ring.close()
        del self.ring


TestArenaPrograms = ArenaProgram.TestCase
TestArenaPrograms.settings = PROGRAM_SETTINGS
TestRingPrograms = RingProgram.TestCase
TestRingPrograms.settings = PROGRAM_SETTINGS


def teardown_module() -> None:
    FILE.unlink(missing_ok=True)

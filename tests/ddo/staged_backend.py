"""The fake device with all host tiers: registered pages, slabs, and a ring that threads refill."""

from __future__ import annotations

import torch

from ddo.host_pins import PAGE, HostPins
from ddo.readers import ReaderThreads, StagedPart
from ddo.staging import InFlight
from tests.ddo.fake_backend import COPY, FakeBackend


class FakeRegistrar:
    """A driver that refuses what real ones refuse: unaligned pages and pages known already."""

    def __init__(self, *, registers_files=True):
        self.registers_files = registers_files
        self.files = []
        self.pages = {}

    def register(self, address, nbytes, *, is_read_only):
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        if not self.registers_files and any(a <= address < b for a, b in self.files):
            return 801
        if any(a < address + nbytes and address < a + n for a, n in self.pages.items()):
            return 712
        self.pages[address] = nbytes
        return 0

    def unregister(self, address):
        del self.pages[address]
        return 0


class StagedBackend(FakeBackend):
    """Its copies through the ring join the queue when a thread comes to them.

    Attributes:
        gate: What threads call before each read, to be replaced by tests.
    """

    def __init__(self, seed=0, *, host_budget=0, registers_files=True, **options):
        super().__init__(seed, **options)
        self.registrar = FakeRegistrar(registers_files=registers_files)
        self.pins = HostPins(self.registrar, host_budget, self._open_stager)
        self.in_flight = InFlight(self.pins.counters)
        self.gate = lambda: None

    def pin(self, memories, *, keep=()):
        super().pin(memories)
        for memory in memories:
            begin = memory.data_ptr() // PAGE * PAGE
            self.registrar.files.append((begin, memory.data_ptr() + memory.numel()))
        self.pins.pin(memories, keep=keep)

    def prepare(self, copies, target):
        direct, staged = [], []
        for copy in copies:
            begin = copy.target_offset
            for piece in self.pins.pieces(copy.memory):
                part = target[begin : begin + piece.memory.numel()]
                if piece.is_pinned or self.pins.stager is None:
                    direct.append((piece.memory, part))
                else:
                    staged.append(StagedPart(piece.memory, piece.file, part))
                begin += piece.memory.numel()
        return direct, staged, target

    def submit(self, prepared, after, ready):
        direct, staged, target = prepared
        self.in_flight.clear_way(target)
        # What will be staged is poisoned and checked against readers now, like every copy.
        poisoned = [
            (torch.full((part.target.numel(),), 0xFF, dtype=torch.uint8), part.target)
            for part in staged
        ]
        super().submit([*direct, *poisoned], after, FakeBackend.fence(self) if staged else ready)
        if staged:
            transfer = self.pins.stager.start(staged, ready)
            self.in_flight.add(ready, target, transfer, prepared)

    def wait(self, fence):
        self.in_flight.settle(fence)
        super().wait(fence)

    def synchronize(self, fence):
        try:
            self.in_flight.settle(fence)
        finally:
            super().synchronize(fence)

    def close(self):
        self.in_flight.close()
        self.pins.close()
        super().close()

    def _open_stager(self, size):
        return ReaderThreads(_Copies(self), self.registrar, size)


class _Copies:
    """The copy queue as reader threads use it."""

    def __init__(self, backend):
        self.backend = backend

    def fence(self):
        return FakeBackend.fence(self.backend)

    def enqueue(self, source, target):
        backend = self.backend
        backend.gate()
        with backend.lock:
            time = backend._tick(COPY)
            begin = target.data_ptr()
            backend._check_write(target)
            backend.writes.append((begin, begin + target.numel(), COPY, time))
            backend.queue.append([(source, target)])
            backend.num_enqueued += 1
            backend._run_some()

    def record(self, fence):
        with self.backend.lock:
            self.backend._record(fence, COPY)

    def wait(self, fence):
        with self.backend.lock:
            while self.backend.num_run < fence.copies:
                self.backend._run_one()

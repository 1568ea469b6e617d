"""A device in host memory whose copies complete late and out of order, and that checks fences.

Copies are queued. A seeded generator decides how many of them run at each call; a wait runs
those that it has to. What a copy will overwrite is poisoned when it is enqueued, so a use that
does not wait for it computes with garbage. Every stream carries a vector clock: a copy that was
not ordered behind an earlier read of its target, or a read that was not ordered behind the copy
before it, fails at once, however lucky the timing was.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

COPY = "copy"


class OrderViolation(AssertionError):
    """Two accesses of the same bytes that no fence puts in order."""


@dataclass
class FakeFence:
    clock: dict = field(default_factory=dict)
    copies: int = 0  # so many copies must have run before this fence is complete
    device: FakeBackend | None = None

    def is_complete(self):
        return self.device is None or self.device.num_run >= self.copies


class _Own(threading.local):
    is_busy = False


class FakeBackend:
    """One device, one copy queue, one compute stream per thread."""

    name = "fake"

    def __init__(self, seed=0, *, limit_bytes=None, eagerness=None, needs_pins=False):
        self.needs_pins = needs_pins
        self.device = torch.device("cpu")
        self.random = random.Random(seed)
        self.eagerness = self.random.choice([0.0, 0.3, 1.0]) if eagerness is None else eagerness
        self.limit_bytes = limit_bytes
        self.queue = deque()
        self.num_run = self.num_enqueued = 0
        self.num_host_waits = 0
        self.num_allocated = 0
        self.clocks = {}
        self.memories = []
        self.writes = []  # (begin, end, stream, time) by address
        self.reads = []
        self.pinned = []
        self.fail_at = {}
        self.num_calls = 0
        self.is_closed = False
        self.lock = threading.RLock()
        self.own = _Own()

    # ---- the protocol ----

    def allocate(self, nbytes):
        self._called("allocate")
        if self.limit_bytes is not None and self.allocated_bytes() + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"fake device has no {nbytes} bytes left")
        self.num_allocated += 1
        memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        self._forget(memory)
        self.memories.append((memory.data_ptr(), nbytes, StorageWeakRef(memory.untyped_storage())))
        return memory

    def allocated_bytes(self):
        self.memories = [memory for memory in self.memories if not memory[2].expired()]
        return sum(nbytes for _, nbytes, _ in self.memories)

    def prepare(self, copies, target):
        for copy in copies if self.needs_pins else ():
            assert self._is_pinned(copy.memory), "a copy would come from pageable memory"
        return [
            (copy.memory, target[copy.target_offset : copy.target_offset + copy.memory.numel()])
            for copy in copies
        ]

    def submit(self, prepared, after, ready):
        with self.lock:
            self._called("submit")
            for fence in after:
                self._merge(COPY, fence.clock)
            time = self._tick(COPY)
            for _, target in prepared:
                self._check_write(target)
                self._forget(target)
                begin = target.data_ptr()
                self.writes.append((begin, begin + target.numel(), COPY, time))
                with self._quiet():
                    target.fill_(0xFF)
            self.queue.append(list(prepared))
            self.num_enqueued += 1
            self._record(ready, COPY)
            self._run_some()

    def fence(self, *, is_timed=False):
        return FakeFence()

    def record(self, fence):
        with self.lock:
            self._called("record")
            self._record(fence, self.stream())

    def wait(self, fence):
        with self.lock:
            self._called("wait")
            self._merge(self.stream(), fence.clock)
            while self.num_run < fence.copies:
                self._run_one()

    def elapsed_s(self, begin, end):
        return None

    def synchronize(self, fence):
        with self.lock:
            self.num_host_waits += 1
            FakeBackend.wait(self, fence)  # under the lock nobody may wait for other threads
            for stream in {*self.clocks, COPY}:  # whatever is enqueued from now on
                self._merge(stream, fence.clock)

    def stream(self):
        return f"compute-{threading.get_ident()}"

    def pin(self, memories):
        self._called("pin")
        self.pinned.extend(memories)

    def free_bytes(self):
        return (self.limit_bytes or 1 << 40) - self.allocated_bytes()

    def untouched_bytes(self):
        return self.free_bytes()

    def measure_link(self):
        return 50e9

    def close(self):
        self.is_closed = True

    # ---- what is behind it ----

    def reading(self):
        """Watch every operator for reads of device memory."""
        return _Watch(self)

    @contextmanager
    def _quiet(self):
        """What the device does by itself is no read of the module's."""
        self.own.is_busy = True
        try:
            yield
        finally:
            self.own.is_busy = False

    def _is_pinned(self, memory):
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        spans = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in self.pinned]
        return any(low <= begin and end <= high for low, high in spans)

    def _called(self, name):
        self.num_calls += 1
        count = self.fail_at.get(name)
        if count is not None:
            self.fail_at[name] = count - 1
            if count == 0:
                raise RuntimeError(f"injected failure of {name}")

    def _tick(self, stream):
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _merge(self, stream, other):
        clock = self.clocks.setdefault(stream, {})
        for key, time in other.items():
            clock[key] = max(clock.get(key, 0), time)

    def _record(self, fence, stream):
        self._tick(stream)
        fence.clock = dict(self.clocks[stream])
        fence.copies = self.num_enqueued if stream == COPY else 0
        fence.device = self

    def _run_some(self):
        while self.queue and self.random.random() < self.eagerness:
            self._run_one()

    def _run_one(self):
        pieces = self.queue.popleft()
        self.random.shuffle(pieces)
        with self._quiet():
            for memory, target in pieces:
                target.copy_(memory)
        self.num_run += 1

    def _is_ordered(self, stream, access):
        _, _, other, time = access
        return self.clocks.get(stream, {}).get(other, 0) >= time

    def _check_write(self, target):
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        for access in self.reads:
            if access[0] < end and begin < access[1] and not self._is_ordered(COPY, access):
                raise OrderViolation(f"copy to {begin:#x} may overtake a read in {access[2]}")

    def _forget(self, target):
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        self.reads = [a for a in self.reads if not (begin <= a[0] and a[1] <= end)]
        self.writes = [a for a in self.writes if not (begin <= a[0] and a[1] <= end)]

    def read(self, tensor):
        """Note a read of a tensor if it lies in device memory."""
        begin = tensor.data_ptr()
        if not begin or not any(a <= begin < a + n for a, n, _ in self.memories):
            return
        with self.lock:
            end = begin + tensor.numel() * tensor.element_size()
            stream = self.stream()
            for access in self.writes:
                if access[0] < end and begin < access[1] and not self._is_ordered(stream, access):
                    raise OrderViolation(f"read of {begin:#x} may precede its copy")
            self.reads.append((begin, end, stream, self._tick(stream)))


def is_view(func):
    """Whether an operator only makes another tensor of the same memory."""
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


class _Watch(TorchDispatchMode):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_quiet = self.backend.own.is_busy or is_view(func)
        for value in () if is_quiet else tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.backend.read(value)
                self.num_reads += 1
        return func(*args, **(kwargs or {}))

"""A cyclic ring of fixed places that copies fill ahead of their use.

Two orderings only, both by fences on the device: a block is used after its copy, and a place is
written after the last use of what lay there. The host waits for nothing: it enqueues as far
ahead as places allow, across the step boundary, and never writes over a block that is expected
sooner than the new one. Copies for the next step that would end after this one wait for its
beginning: a caller that waits for the whole device between steps would wait for them as well.
What comes in another order than expected is fetched when it is asked for, and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

import torch

from ddo.errors import DdoError
from ddo.weight_files import SourceError


class TransferError(DdoError, RuntimeError):
    """A copy was asked for that cannot be done."""


class Fence(Protocol):
    """A point in a stream. Never recorded, it is complete; recorded again, it moves."""

    def is_complete(self) -> bool:
        """Whether the device has passed it. Does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes to move: `memory` is a uint8 CPU tensor, `target_offset` counts from the target."""

    memory: torch.Tensor
    target_offset: int


class Backend(Protocol):
    """What the offloader needs of a device. Streams and fences stay inside.

    `device` holds the weights in use; `name` goes into reports. All methods but `synchronize`
    and `pin` return without waiting for the device or the disk; `wait` and `submit` wait for
    reader threads that have not come to a copy which is needed now.
    """

    name: str
    device: torch.device
    num_host_waits: int

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory as a uint8 tensor of shape `(nbytes,)`, aligned to 256 bytes.

        Work of the caller's stream may still be using it. Raises `torch.OutOfMemoryError`.
        """
        ...

    def prepare(self, copies: Sequence[HostCopy], target: torch.Tensor) -> Any:
        """Whatever makes the same copies cheap to submit again and again."""
        ...

    def submit(self, prepared: Any, after: Sequence[Fence], ready: Fence) -> None:
        """Enqueue copies behind all earlier ones and behind `after`, then record `ready`."""
        ...

    def fence(self, *, is_timed: bool = False) -> Fence:
        """A fence that was never recorded."""
        ...

    def record(self, fence: Fence) -> None:
        """Record on the caller's current stream."""
        ...

    def wait(self, fence: Fence) -> None:
        """Let later work of the caller's current stream wait for the fence.

        Raises:
            SourceError: Bytes on their way to it could not be read.
        """
        ...

    def elapsed_s(self, begin: Fence, end: Fence) -> float | None:
        """Device time between two complete timed fences; None if unknown."""
        ...

    def synchronize(self, fence: Fence) -> None:
        """Block the host until the fence is complete. Counted; never in the steady state."""
        ...

    def stream(self) -> Hashable:
        """Tells the caller's current stream from others."""
        ...

    def pin(self, memories: Sequence[torch.Tensor], *, keep: Sequence[torch.Tensor] = ()) -> None:
        """Make copies from these uint8 CPU tensors fast, as far as the host budget goes.

        What was made fast before and is not in `keep` may become slow again.
        """
        ...

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""
        ...

    def untouched_bytes(self) -> int:
        """Device memory that nobody holds: what torch keeps without using it counts as held."""
        ...

    def measure_link(self) -> float:
        """Bytes per second from pinned host memory to the device. May block the host."""
        ...

    def close(self) -> None:
        """Give back what was pinned, until something is pinned again.

        The caller has waited for all copies.
        """
        ...


@dataclass(slots=True)
class RingCounters:
    """What a ring has done since it was made."""

    num_copies: int = 0
    copied_bytes: int = 0
    num_acquired: int = 0
    num_missed: int = 0
    num_reordered: int = 0
    num_spilled: int = 0


@dataclass(slots=True)
class RingBlock:
    """One block that streams.

    Attributes:
        nbytes: Aligned size.
        begin: First byte of its place in the ring.
        copies: Its bytes on the host.
        positions: Where it comes in the order of use, ascending.
    """

    nbytes: int
    begin: int
    copies: Sequence[HostCopy]
    positions: list[int] = field(default_factory=list)
    place: torch.Tensor | None = None
    prepared: Any = None
    ready: Any = None
    readers: dict[Hashable, Any] = field(default_factory=dict)
    pending: set[Hashable] = field(default_factory=set)
    rivals: frozenset[int] = frozenset()
    is_loaded: bool = False
    copied_bytes: int = 0
    num_users: int = 0
    num_copies: int = 0
    spill: torch.Tensor | None = None


class Ring:
    """Streams blocks through one stretch of device memory. Thread-safe.

    Args:
        memory: Device bytes, borrowed; nobody else may use them.
        blocks: What streams, each with its fixed place.
        order: Block numbers in the order of use; a step uses it once, then it starts again.
        num_ahead: Uses of the next step that are copied before it begins; None: all that can be.

    Attributes:
        num_ahead: As given; may change at any time.
    """

    def __init__(
        self,
        backend: Backend,
        memory: torch.Tensor,
        blocks: Sequence[RingBlock],
        order: Sequence[int],
        *,
        num_ahead: int | None = None,
    ) -> None:
        self.counters = RingCounters()
        self.num_ahead = num_ahead
        self._backend = backend
        self._memory = memory
        self._blocks = list(blocks)
        self._order = list(order)
        self._lock = RLock()
        self._cursor = 0  # the position that is expected next
        self._ahead = 0  # so many blocks from there on are loaded
        self._is_over = False  # all uses of this step have begun
        self._loaded: set[int] = set()
        self._born: Fence | None = backend.fence()
        backend.record(self._born)
        for position, index in enumerate(order):
            self._blocks[index].positions.append(position)
        for index, block in enumerate(self._blocks):
            self._check(index, block)
            block.place = memory[block.begin : block.begin + block.nbytes]
            block.prepared = backend.prepare(block.copies, block.place)
            block.ready = backend.fence()
            block.copied_bytes = sum(copy.memory.numel() for copy in block.copies)
            block.rivals = frozenset(
                j
                for j, other in enumerate(self._blocks)
                if j != index
                and other.begin < block.begin + block.nbytes
                and block.begin < other.begin + other.nbytes
            )

    def _check(self, index: int, block: RingBlock) -> None:
        if not block.positions:
            raise TransferError(f"ring block {index} is not in the order of use; plan it anew")
        if block.begin + block.nbytes > self._memory.numel():
            raise TransferError(
                f"ring block {index} ends at byte {block.begin + block.nbytes}, the ring has "
                f"{self._memory.numel()} bytes; plan it anew"
            )

    def prefetch(self) -> None:
        """Enqueue copies as far ahead as places allow. Called by `release` as well."""
        with self._lock:
            farthest = self._farthest()
            while self._ahead < farthest:
                index = self._order[(self._cursor + self._ahead) % len(self._order)]
                if not self._blocks[index].is_loaded and not self._try_load(index):
                    return
                self._ahead += 1

    def _farthest(self) -> int:
        """How many uses ahead copies may go now."""
        count = len(self._order)
        if self.num_ahead is None:
            return count
        left = 0 if self._is_over else count - self._cursor
        return min(count, left + self.num_ahead)

    def acquire(self, index: int) -> torch.Tensor:
        """The block's bytes, shape `(nbytes,)`, valid in the caller's stream until `release`."""
        with self._lock:
            block = self._blocks[index]
            self.counters.num_acquired += 1
            self._advance(block)
            if block.spill is None and not block.is_loaded:
                self.counters.num_missed += 1
                self._fetch(index, block)
            block.num_users += 1
            try:
                self._backend.wait(block.ready)
            except BaseException:
                self._give_up(index, block)
                raise
            if block.spill is not None:
                return block.spill
            assert block.place is not None
            return block.place

    def _give_up(self, index: int, block: RingBlock) -> None:
        """The bytes did not come, or an interrupt came first: whoever asks next copies again."""
        block.num_users -= 1
        if block.num_users:
            return
        block.spill = None
        block.is_loaded = False
        self._loaded.discard(index)
        self._ahead = 0

    def release(self, index: int) -> bool:
        """End one use; what the caller's stream has enqueued by now is waited for.

        Returns:
            Whether nobody uses the block any more.
        """
        with self._lock:
            block = self._blocks[index]
            if not block.num_users:
                raise TransferError(f"ring block {index} is released but nobody acquired it")
            stream = self._backend.stream()
            if stream not in block.readers:
                block.readers[stream] = self._backend.fence()
            self._backend.record(block.readers[stream])
            block.pending.add(stream)
            block.num_users -= 1
            if block.num_users:
                return False
            if block.spill is not None:
                self._drop_spill(block, stream)
            self.prefetch()
            return True

    def place(self, index: int) -> torch.Tensor | None:
        """The block's fixed place, whatever lies there now."""
        return self._blocks[index].place

    def begin_step(self) -> None:
        """Expect the first block next. A step that left blocks out ends here."""
        with self._lock:
            self._is_over = False
            if self._cursor:
                self._cursor = 0
                self._ahead = 0
            self.prefetch()

    def abandon(self) -> list[int]:
        """Release everything that is in use, after an interrupt; returns what was in use."""
        with self._lock:
            used = [i for i, block in enumerate(self._blocks) if block.num_users]
            for index in used:
                while self._blocks[index].num_users:
                    self.release(index)
            return used

    def drain(self) -> None:
        """Block the host until no copy and no use is pending. Nothing is loaded afterwards."""
        with self._lock:
            for block in self._blocks:
                with suppress(SourceError):  # of bytes that nobody wants any more
                    self._backend.synchronize(block.ready)
                for stream in block.pending:
                    self._backend.synchronize(block.readers[stream])
                block.pending.clear()
                block.is_loaded = False
            self._loaded.clear()
            self._cursor = self._ahead = 0
            self._is_over = False

    def _advance(self, block: RingBlock) -> None:
        """Move the expectation behind this use of the block."""
        distance = self._distance(block)
        if distance:
            self.counters.num_reordered += 1
            self._ahead = 0
        self._cursor = (self._cursor + distance + 1) % len(self._order)
        self._is_over = not self._cursor
        self._ahead = max(0, self._ahead - 1)

    def _distance(self, block: RingBlock) -> int:
        """Uses that are expected before the block's next one."""
        at = bisect_left(block.positions, self._cursor)
        if at < len(block.positions):
            return block.positions[at] - self._cursor
        return block.positions[0] + len(self._order) - self._cursor

    def _try_load(self, index: int) -> bool:
        """Copy the block to its place unless something that is needed sooner lies there."""
        block = self._blocks[index]
        if block.spill is not None:
            return False
        evicted = block.rivals & self._loaded
        for j in evicted:
            rival = self._blocks[j]
            if rival.num_users or self._distance(rival) <= self._ahead:
                return False
        self._load(index, block, evicted)
        return True

    def _fetch(self, index: int, block: RingBlock) -> None:
        """Load a block that is wanted now, whatever else lies in its place."""
        evicted = block.rivals & self._loaded
        if any(self._blocks[j].num_users for j in evicted):
            self._spill(block)
            return
        self._ahead = 0
        self._load(index, block, evicted)

    def _load(self, index: int, block: RingBlock, evicted: Set[int]) -> None:
        after = [] if self._born is None else [self._born]
        for rival in (block, *(self._blocks[j] for j in evicted)):
            # A use that is not over may still read this place; copies of earlier loads are
            # ahead of this one in the same queue.
            after += [rival.readers[stream] for stream in rival.pending]
            rival.pending.clear()
            rival.is_loaded = False
        self._loaded -= evicted
        self._loaded.discard(index)
        try:
            self._submit(block, block.prepared, after)
        except BaseException:
            for fence in after:  # nobody else remembers these readers
                self._backend.synchronize(fence)
            raise
        self._born = None  # later copies are behind this one, and so behind it
        self._loaded.add(index)
        block.is_loaded = True

    def _spill(self, block: RingBlock) -> None:
        """Its place is in use, by another thread or a module around it: take memory for once."""
        self.counters.num_spilled += 1
        with torch.inference_mode(False):  # else the weights could not be bound outside of it
            block.spill = self._backend.allocate(block.nbytes)
        free = self._backend.fence()
        self._backend.record(free)  # the allocator may hand out memory that is still being read
        self._submit(block, self._backend.prepare(block.copies, block.spill), [free])

    def _drop_spill(self, block: RingBlock, stream: Hashable) -> None:
        """Give the memory back: its next owner comes after this stream's work, no other's."""
        for other in block.pending - {stream}:
            self._backend.synchronize(block.readers[other])
        block.spill = None

    def _submit(self, block: RingBlock, prepared: Any, after: Sequence[Fence]) -> None:
        self._backend.submit(prepared, after, block.ready)
        block.num_copies += 1
        self.counters.num_copies += 1
        self.counters.copied_bytes += block.copied_bytes

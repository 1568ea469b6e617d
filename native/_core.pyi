"""The C++ extension. Sizes and addresses are bytes; streams are driver handles as integers.

Every call that may wait or take a lock runs without the GIL. Errors are those of `native.errors`.
"""

import enum
from collections.abc import Sequence
from typing import final

from typing_extensions import CapsuleType

class RangeState(enum.Enum):
    """reserved -> committed -> draining -> reserved or retired."""

    RESERVED = 0
    COMMITTED = 1
    DRAINING = 2
    RETIRED = 3

class SlotState(enum.Enum):
    """free -> filling -> ready -> in use -> draining -> free, or straight on to filling."""

    FREE = 0
    FILLING = 1
    READY = 2
    IN_USE = 3
    DRAINING = 4

class DeviceUse(enum.Enum):
    """What device bytes are for. All count against one limit."""

    WEIGHTS = 0
    RING = 1
    TORCH = 2

class Hold(enum.Enum):
    """What an exported view keeps: the pages, or the address alone.

    Reading through a view that holds the address alone is legal only between `acquire` and
    `release` of its range: on a GPU anything else faults and ends the process's use of CUDA.
    """

    PAGES = 0
    ADDRESS = 1

class TierOutcome(enum.Enum):
    """Whether a tier serves all that was asked of it, or why not. The next tier serves the rest."""

    COMPLETE = 0
    LIMIT = 1
    UNSUPPORTED = 2
    REFUSED = 3

class Driver:
    """The CUDA driver or the fake one."""

    @property
    def is_fake(self) -> bool:
        """Whether results come from the fake driver."""
    @property
    def num_calls(self) -> int:
        """Driver calls made so far."""
    @property
    def fault_was_delivered(self) -> bool:
        """Whether the armed fault has happened."""
    def inject_fault(self, nth: int, status: int = 999) -> None:
        """Let the nth call from now fail with a status, unmade. 0 disarms."""

@final
class FakeDriver(Driver):
    """A driver in host memory: contents are real, time and order are made up from a seed."""

    def __init__(
        self,
        *,
        total_bytes: int = ...,
        granularity: int = ...,
        seed: int = 0,
        is_delayed: bool = False,
        has_virtual_memory: bool = True,
        has_host_registration: bool = True,
        has_read_only_registration: bool = True,
    ) -> None:
        """`is_delayed`: work waits for `advance`, `run_all` or a synchronising call."""
    def advance(self) -> bool:
        """Run one runnable operation, drawn at random; False when there is none."""
    def run_all(self) -> int:
        """Run until nothing is runnable; how many operations ran."""
    def set_delayed(self, is_delayed: bool) -> None:
        """Switch delay on, or off after running what is pending."""
    def launch(self, stream: int, milliseconds: float) -> None:
        """Enqueue work that takes virtual time and touches nothing."""
    @property
    def num_pending(self) -> int:
        """Operations enqueued and not yet run."""
    def violations(self) -> list[str]:
        """Uses that a GPU would punish: empty for a correct caller."""
    def driver_objects(self) -> dict[str, int]:
        """Driver-side objects and bytes that are alive."""

def open_driver() -> Driver:
    """The initialised CUDA driver.

    Raises:
        DriverUnavailableError: There is none, it is too old, or it sees no device.
    """

@final
class Device:
    """An opened device. What is made on it keeps it alive."""

    def __init__(self, driver: Driver, ordinal: int = 0) -> None: ...
    @property
    def driver(self) -> Driver: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def granularity(self) -> int:
        """Page size of device memory."""
    @property
    def has_read_only_registration(self) -> bool:
        """Whether files can be registered; else slabs or staging serve them."""
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes, by the driver."""
    def synchronize(self) -> None:
        """Wait for all work of the device's context."""

@final
class Stream:
    """An owned, non-blocking stream."""

    def __init__(self, device: Device) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...

@final
class EventFence:
    """A point in a stream. Never recorded counts as complete."""

    def __init__(self, device: Device, *, has_timing: bool = False) -> None: ...
    def record(self, stream: int) -> None:
        """Move the fence to the end of what the stream has now."""
    def is_complete(self) -> bool: ...
    def block_stream(self, stream: int) -> None:
        """Let later work of a stream wait on the device; the host goes on."""
    def synchronize(self) -> None:
        """Block until complete."""
    def elapsed_ms_since(self, begin: EventFence) -> float:
        """Device time between two completed fences with timing."""

@final
class PressureEvent:
    """A request that did not fit at first."""

    @property
    def requested_bytes(self) -> int: ...
    @property
    def freed_bytes(self) -> int: ...
    @property
    def demoted_range_ids(self) -> list[int]: ...
    @property
    def was_met(self) -> bool: ...

@final
class ArenaStats:
    """Counters of an arena, at one moment."""

    @property
    def limit_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def used_by_use(self) -> dict[str, int]:
        """Keys "weights", "ring" and "torch"."""
    @property
    def peak_by_use(self) -> dict[str, int]: ...
    @property
    def address_bytes(self) -> int: ...
    @property
    def free_address_bytes(self) -> int: ...
    @property
    def largest_free_address_bytes(self) -> int: ...
    @property
    def num_ranges(self) -> int: ...
    @property
    def num_draining(self) -> int: ...
    @property
    def num_commits(self) -> int: ...
    @property
    def num_demotions(self) -> int: ...
    @property
    def num_pressure_events(self) -> int: ...
    @property
    def num_out_of_memory(self) -> int: ...

@final
class Arena:
    """Ranges of device memory out of one address reservation, backed under one limit."""

    def __init__(self, device: Device, *, limit_bytes: int, reserve_bytes: int) -> None:
        """`reserve_bytes` of address space cost nothing; give several times the limit."""
    def reserve(self, nbytes: int, *, alignment: int = 256, use: DeviceUse = ...) -> Range:
        """Addresses without memory.

        Raises:
            SizeError: 0 bytes, or an alignment that is no power of two up to the granularity.
            OutOfMemoryError: The address space is used up.
        """
    def collect(self) -> int:
        """Unmap what no longer has a user, without waiting; bytes unmapped."""
    def reclaim(self, nbytes: int) -> bool:
        """Wait for draining ranges, then demote demotable ones, until so many bytes are free."""
    def take_pressure_events(self) -> list[PressureEvent]:
        """What happened since the last call; the newest 256 are kept."""
    def stats(self) -> ArenaStats: ...
    def close(self) -> None:
        """Wait for all users and give everything back.

        Raises:
            BusyError: A view, an acquired range, a ring or a torch segment lives.
        """
    @property
    def is_closed(self) -> bool: ...
    @property
    def device(self) -> Device: ...

@final
class Range:
    """Part of an arena's addresses; retired when dropped."""

    def commit(self) -> None:
        """Put memory behind the addresses, relieving pressure if need be.

        Raises:
            OutOfMemoryError: The limit or the device has not enough left.
        """
    def demote(self) -> None:
        """Give the memory back once fences, pins and views allow; keep the addresses."""
    def retire(self) -> None:
        """Give memory and addresses back once fences, pins and views allow."""
    def acquire(self) -> bool:
        """Pin the pages for use; False when they have been demoted."""
    def release(self, stream: int) -> None:
        """Undo one `acquire`; the pages outlast what the stream has now."""
    def record_use(self, stream: int) -> None:
        """Let the pages outlast what the stream has now."""
    def set_demotion_order(self, order: int | None) -> None:
        """Demote under pressure, lowest first; None: never."""
    @property
    def state(self) -> RangeState: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def id(self) -> int: ...
    def export(
        self,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        hold: Hold = ...,
        streams: Sequence[Stream | int] = ...,
    ) -> CapsuleType:
        """A DLPack capsule of uint8, shape `(nbytes,)`, without a copy.

        Of the fake driver it is a CPU tensor. The consumer's tensor keeps what `hold` says; when
        it ends, the work that `streams` have then counts as a use, as by `record_use`. A
        `Stream` is kept alive until then; a stream given by its handle has to outlive the view.
        """

@final
class TorchRoute:
    """Routes the symbols `exeunt_torch_malloc` and `exeunt_torch_free` to an arena."""

    def __init__(self, arena: Arena) -> None: ...
    def close(self) -> None:
        """Refuse new segments; those that are out stay valid."""

@final
class TorchStats:
    """Counters of all routes of this process."""

    @property
    def num_allocations(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...

def torch_stats() -> TorchStats:
    """Counters of all routes of this process."""

@final
class HostBudget:
    """The limit of pinned host bytes."""

    def __init__(self, *, limit_bytes: int) -> None: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def used_by_use(self) -> dict[str, int]:
        """Keys "registered", "slab" and "staging"."""

@final
class FileMapping:
    """A weight file mapped read-only and shared."""

    def __init__(self, path: str) -> None:
        """Raise FileAccessError, or SizeError for an empty or irregular file."""
    @property
    def path(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def has_direct_io(self) -> bool: ...
    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Device, inode, size in bytes, modification time in ns."""
    def verify(self) -> None:
        """Raise FileChangedError unless path and open file are what was opened."""

@final
class TierResult:
    """What a tier took on."""

    @property
    def outcome(self) -> TierOutcome: ...
    @property
    def requested_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def status_name(self) -> str:
        """The driver's status when it refused."""

@final
class HostSource:
    """A weight file as a source of copies."""

    def __init__(self, device: Device, host_budget: HostBudget, file: FileMapping) -> None:
        """A mapping serves one source; StateError for a second one."""
    def register_pages(
        self, offset: int, nbytes: int, *, window_bytes: int = 1073741824
    ) -> TierResult:
        """Register the file's pages with the driver, as many windows as the limit allows."""
    def load_slab(self, offset: int, nbytes: int) -> TierResult:
        """Read a stretch into a pinned slab of exactly its size, or none of it."""
    def release(self) -> None:
        """Let all tiers go; pending copies keep theirs."""
    @property
    def registered_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...

@final
class Readback:
    """Pinned host memory that device bytes come back into."""

    def __init__(self, device: Device, host_budget: HostBudget, nbytes: int) -> None: ...
    def enqueue(self, address: int, nbytes: int, stream: int) -> None: ...
    def take(self) -> bytes:
        """Wait for the copy and return its bytes."""

@final
class Unit:
    """File ranges that move together."""

    def __init__(self, items: Sequence[tuple[HostSource, int, int, int]]) -> None:
        """Items are source, file offset, bytes, offset in the slot or range."""
    @property
    def nbytes(self) -> int: ...
    @property
    def target_nbytes(self) -> int: ...

@final
class HostPages:
    """Host pages that belong to the caller, pinned while this lives. CudaError when refused."""

    def __init__(
        self, device: Device, address: int, nbytes: int, *, is_read_only: bool
    ) -> None: ...

@final
class CopyBatch:
    """Copies between the caller's own addresses, submitted together again and again."""

    def __init__(self, device: Device, parts: Sequence[tuple[int, int, int]]) -> None:
        """Parts are host address, bytes, device address. None may cross registrations."""
    def submit(self, stream: int, after: Sequence[EventFence], ready: EventFence) -> None:
        """Enqueue the copies behind `after`, and record `ready` behind them."""
    @property
    def nbytes(self) -> int: ...
    @property
    def num_copies(self) -> int: ...

@final
class StagingRing:
    """Pinned buffers that reader threads fill from files and copy from."""

    def __init__(
        self,
        device: Device,
        host_budget: HostBudget,
        *,
        num_buffers: int = 4,
        buffer_bytes: int = 8388608,
        num_threads: int = 2,
        prefers_direct: bool = False,
    ) -> None:
        """`prefers_direct`: read past the page cache where the file system allows it."""

@final
class StagedTransfer:
    """Copies that reader threads are enqueueing."""

    def wait(self, timeout_s: float) -> bool:
        """Block the host until all are enqueued; False if they are not by then.

        Raises:
            FileChangedError: A file has changed or become shorter; names file and offset.
            FileAccessError: A file cannot be read.
        """
    @property
    def is_complete(self) -> bool:
        """Whether all are enqueued, or one has failed and the rest are over."""

@final
class StagedBatch:
    """Copies of which some go through a staging ring, submitted together again and again."""

    def __init__(
        self,
        staging: StagingRing,
        direct: Sequence[tuple[int, int, int]],
        from_files: Sequence[tuple[FileMapping, int, int, int]],
        from_memory: Sequence[tuple[int, int, int]],
    ) -> None:
        """Direct parts and those from memory are host address, bytes, device address.

        Those from files are file, offset, bytes, device address. Both kinds are staged.
        """
    def submit(self, stream: int, after: Sequence[EventFence], ready: EventFence) -> StagedTransfer:
        """Enqueue behind `after`, and record `ready` behind all, by the transfer's end.

        Before that `ready` is where it was: wait for the transfer, then for the fence.
        """
    @property
    def nbytes(self) -> int: ...
    @property
    def staged_nbytes(self) -> int: ...

@final
class TimingTotals:
    """Device time between events, of what was measured."""

    @property
    def milliseconds(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_measured(self) -> int: ...
    @property
    def num_unmeasured(self) -> int: ...

@final
class RingStats:
    """Counters of a transfer ring, at one moment."""

    @property
    def num_units(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def num_merged(self) -> int: ...
    @property
    def num_full(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def pageable_bytes(self) -> int: ...
    @property
    def copies(self) -> TimingTotals:
        """Time and bytes of unstaged units' copies: their quotient is the achieved rate."""
    @property
    def stalls(self) -> TimingTotals:
        """Time that consumers' streams waited for slots."""

@final
class TransferRing:
    """A cyclic ring of slots on the device, filled ahead of their consumers."""

    def __init__(
        self,
        arena: Arena,
        *,
        num_slots: int,
        slot_nbytes: int,
        copy_stream: int,
        staging: StagingRing | None = None,
        timing_interval: int = 4,
    ) -> None:
        """`copy_stream` is borrowed. Without `staging`, unpinned bytes go the pageable way.

        One unit in `timing_interval` has its copies and its stall measured; 0 measures none.
        """
    def try_submit(self, unit: Unit) -> int | None:
        """Enqueue a unit's copies into the next slot; its ticket, or None when all are needed."""
    def acquire(self, ticket: int, stream: int) -> None:
        """Let a stream's later work wait for the unit, and count a reader.

        Raises:
            StateError: The slot holds another unit by now.
            FileChangedError: A staged part could not be read; the slot is free again.
        """
    def release(self, ticket: int, stream: int) -> None:
        """End a reader: the slot is refilled only after what the stream has now."""
    def cancel(self, ticket: int) -> None:
        """Give up a unit that nobody acquired."""
    def is_current(self, ticket: int) -> bool:
        """Whether the slot still holds the ticket's bytes: acquiring it again needs no copy."""
    def slot_of(self, ticket: int) -> int: ...
    def state(self, slot: int) -> SlotState: ...
    def slot_address(self, slot: int) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    def export_slot(self, slot: int) -> CapsuleType:
        """A DLPack capsule of one whole slot, uint8. It keeps the ring's memory."""
    def stats(self) -> RingStats: ...
    def close(self) -> None:
        """Wait for copies and readers, then give the slots back. BusyError while acquired."""

def upload(range: Range, unit: Unit, stream: int, staging: StagingRing | None = None) -> EventFence:
    """Enqueue a unit's copies into a committed range; the fence after them."""

def available() -> tuple[bool, str]:
    """Whether libcuda can be loaded, with the reason when it cannot. Makes no CUDA call."""

def live_objects() -> dict[str, int]:
    """Live native objects of this process by kind."""

def leaks() -> list[tuple[str, str]]:
    """Driver calls that failed to give something back, with their status; at most 64."""

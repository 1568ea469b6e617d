"""The pinned ring: a few pinned buffers that reader threads refill, for what is not pinned itself.

The threads read a weight's bytes out of its file, or out of pageable memory, into a buffer and
enqueue the copy from there. So a copy that goes this way is enqueued a while after it was asked
for. Until then its fence is where it was, and whoever waits for the fence waits for the threads
first; nothing else does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ddo.pin_counters import PinCounters
from ddo.source import FileRange
from ddo.weight_files import SourceError

ALIGNMENT = 4096
"""Bytes; what reads past the page cache ask of a buffer."""

_BUFFER_BYTES = 8 << 20
_BUFFERS_PER_THREAD = 2  # one is read into while the other is copied from
_MAX_THREADS = 4  # each copies 5 to 10 GB/s out of the page cache
_SHARE = 4  # of what the budget has left, the ring takes at most this part
_POLL_S = 0.1  # so long an interrupt may have to wait


@dataclass(frozen=True, slots=True)
class HostPiece:
    """A stretch of a weight's bytes that takes one way to the device.

    Attributes:
        memory: The bytes, uint8 of shape `(nbytes,)`; of slabs, those of the slab.
        is_pinned: Whether the device reads them there by itself.
        file: Where the same bytes lie in a file, if they are to be staged and a file is known.
    """

    memory: Tensor
    is_pinned: bool
    file: FileRange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSize:
    """How large a pinned ring is."""

    num_threads: int
    num_buffers: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_buffers * self.buffer_bytes


def staging_size(left_bytes: int, num_cores: int | None = None) -> StagingSize | None:
    """A ring that takes at most a quarter of what the host budget has left; None if too small."""
    cores = num_cores or len(os.sched_getaffinity(0))
    for num_threads in range(max(2, min(_MAX_THREADS, cores // 4)), 0, -1):
        num_buffers = num_threads * _BUFFERS_PER_THREAD
        room = min(_BUFFER_BYTES, left_bytes // _SHARE // num_buffers)
        if room >= ALIGNMENT:
            return StagingSize(
                num_threads=num_threads,
                num_buffers=num_buffers,
                buffer_bytes=room // ALIGNMENT * ALIGNMENT,
            )
    return None


class Stager(Protocol):
    """A pinned ring with its threads."""

    def close(self) -> None:
        """Finish what was started and give the buffers back. Blocks."""
        ...


OpenStager = Callable[[StagingSize], Stager | None]
"""Opens a ring of a size; None if the device refuses the buffers."""


class Transfer(Protocol):
    """Copies that threads are enqueueing."""

    def wait(self, timeout_s: float) -> bool:
        """Block until all are enqueued; False if they are not by then. Raises what failed."""
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    fence: Any
    begin: int
    end: int
    transfer: Transfer
    kept: Any


class InFlight:
    """Transfers whose copies may not be enqueued yet, by fence and by target. Thread-safe.

    Args:
        counters: Counts how often somebody had to wait.
        failures: Exceptions of transfers that are errors of the source.
    """

    def __init__(self, counters: PinCounters, failures: tuple[type[Exception], ...] = ()) -> None:
        self._counters = counters
        self._failures = failures
        self._lock = threading.Lock()
        self._flights: list[_Flight] = []

    def add(self, fence: Any, target: Tensor, transfer: Transfer, kept: Any) -> None:
        """Remember a transfer that will record `fence`; `kept` has to outlive it."""
        begin = target.data_ptr()
        flight = _Flight(fence, begin, begin + target.numel(), transfer, kept)
        with self._lock:
            self._flights.append(flight)

    def settle(self, fence: Any) -> None:
        """Block the host until the fence is recorded behind its copies.

        Raises:
            SourceError: A file has changed, is shorter or cannot be read.
        """
        for flight in self._matching(lambda flight: flight.fence is fence):
            self._land(flight)

    def clear_way(self, target: Tensor) -> None:
        """Let nothing be written to `target` any more that was asked for earlier.

        What is still on its way there would arrive after the next copy to the same place.
        """
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        for flight in self._matching(lambda f: f.begin < end and begin < f.end):
            with suppress(SourceError):  # nobody wants these bytes any more
                self._land(flight)

    def close(self) -> None:
        """Block until nothing is on its way."""
        for flight in self._matching(lambda _: True):
            with suppress(SourceError):
                self._land(flight)

    def _matching(self, is_meant: Callable[[_Flight], bool]) -> Sequence[_Flight]:
        if not self._flights:  # the usual case, and the hot one
            return ()
        with self._lock:
            return [flight for flight in self._flights if is_meant(flight)]

    def _land(self, flight: _Flight) -> None:
        """Wait for a transfer, in short steps so that an interrupt gets through."""
        try:
            if not flight.transfer.wait(0):
                self._counters.num_staging_waits += 1
                while not flight.transfer.wait(_POLL_S):
                    pass
        except self._failures as error:
            self._forget(flight)
            raise SourceError(str(error)) from error
        except Exception:
            self._forget(flight)
            raise
        self._forget(flight)

    def _forget(self, flight: _Flight) -> None:
        with self._lock, suppress(ValueError):
            self._flights.remove(flight)

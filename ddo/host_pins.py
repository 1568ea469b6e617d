"""Host memory that a device may read by itself, under a limit: registered pages, then slabs.

Registration goes through the driver's own library: an error of the runtime's function would
stay behind and be raised by an innocent later call.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_READ_ONLY = 0x08
NOT_SUPPORTED = 801
"""The driver's status for what it cannot do: the next tier serves the bytes."""

_JOIN_GAP = 1 << 20  # pages between two copies that are cheaper to register than to skip


class Registrar(Protocol):
    """Makes host pages known to a device. Both return the driver's status, 0 for success."""

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> int: ...

    def unregister(self, address: int) -> int: ...


class DriverRegistrar:
    """The driver's own functions; the calling thread has a context of the device.

    Args:
        library: In place of the driver's.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> int:
        """Pin whole pages; `NOT_SUPPORTED`, without asking the driver, for a private file's.

        The kernel would copy each of those pages at best. Registered read-only, they were seen
        never to return from the driver.
        """
        if touches_private_file(address, nbytes):
            return NOT_SUPPORTED
        flags = _READ_ONLY if is_read_only else 0
        return int(
            self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)
            )
        )

    def unregister(self, address: int) -> int:
        """Let pinned pages go."""
        return int(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))


def touches_private_file(address: int, nbytes: int, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether any of these pages is of a file that is mapped `MAP_PRIVATE`. Linux only."""
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in lines:
        span, permissions, _, _, inode = line.split(maxsplit=5)[:5]
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin < address + nbytes and address < end and permissions[3] == "p" and inode != "0":
            return True
    return False


@dataclass(slots=True)
class PinCounters:
    """Bytes by tier, and what was refused."""

    registered_bytes: int = 0
    slab_bytes: int = 0
    pageable_bytes: int = 0
    num_refused: int = 0
    last_status: int = 0


@dataclass(frozen=True, slots=True)
class _Pages:
    begin: int
    end: int
    owner: Tensor  # keeps the pages mapped


@dataclass(frozen=True, slots=True)
class _Slab:
    begin: int
    end: int
    memory: Tensor


class HostPins:
    """Pins stretches of memory until a budget is used up. Not thread-safe.

    Args:
        budget_bytes: Most bytes that are registered or held in slabs at a time.
    """

    def __init__(self, registrar: Registrar, budget_bytes: int) -> None:
        self.counters = PinCounters()
        self._registrar = registrar
        self._budget_bytes = budget_bytes
        self._registered: list[_Pages] = []  # by address, never overlapping
        self._slabs: list[_Slab] = []  # by the address of what they copy

    @property
    def left_bytes(self) -> int:
        used = self.counters.registered_bytes + self.counters.slab_bytes
        return max(0, self._budget_bytes - used)

    def pin(self, memories: Iterable[Tensor]) -> None:
        """Pin uint8 CPU tensors, in the order of their addresses, as far as the budget goes.

        What the device refuses to register is copied to a slab; what exceeds the budget stays
        pageable.
        """
        wanted = [memory for memory in memories if memory.numel()]
        for span in _spans(wanted):
            begin = span[0].data_ptr() // PAGE * PAGE
            end = _page_end(span[-1])
            is_refused = False
            for low, high in self._gaps(begin, end):
                is_refused |= not self._register(low, high, span[0])
            for memory in span:
                if is_refused and self._pageable_bytes(memory):
                    self._copy_to_slab(memory)
        self.counters.pageable_bytes = sum(self._pageable_bytes(memory) for memory in wanted)

    def sources(self, memory: Tensor) -> list[Tensor]:
        """Where to copy a tensor's bytes from, in order.

        A copy may not run from one registration into the next, nor from pinned to pageable.
        """
        slab = self._slab(memory)
        if slab is not None:
            begin = memory.data_ptr() - slab.begin
            return [slab.memory[begin : begin + memory.numel()]]
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        cuts = sorted(
            {
                cut - start
                for pages in self._registered
                for cut in (pages.begin, pages.end)
                if start < cut < stop
            }
        )
        edges = [0, *cuts, memory.numel()]
        return [memory[low:high] for low, high in pairwise(edges)]

    def close(self) -> None:
        """Unregister everything. No copy may be pending."""
        for pages in self._registered:
            self._registrar.unregister(pages.begin)
        for slab in self._slabs:
            self._registrar.unregister(slab.memory.data_ptr())
        self._registered.clear()
        self._slabs.clear()
        self.counters.registered_bytes = self.counters.slab_bytes = 0

    def _gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range of pages that are not registered."""
        gaps: list[tuple[int, int]] = []
        for pages in self._registered:
            if pages.end <= begin or end <= pages.begin:
                continue
            if begin < pages.begin:
                gaps.append((begin, pages.begin))
            begin = pages.end
        if begin < end:
            gaps.append((begin, end))
        return gaps

    def _register(self, begin: int, end: int, owner: Tensor) -> bool:
        """Register pages, as many as the budget has; False if the device refuses."""
        end = min(end, begin + self.left_bytes // PAGE * PAGE)
        if end <= begin:
            return True
        for is_read_only in (True, False):
            status = self._registrar.register(begin, end - begin, is_read_only=is_read_only)
            if status == 0:
                insort(self._registered, _Pages(begin, end, owner), key=lambda p: p.begin)
                self.counters.registered_bytes += end - begin
                return True
            self.counters.num_refused += 1
            self.counters.last_status = status
        return False

    def _pageable_bytes(self, memory: Tensor) -> int:
        if self._slab(memory) is not None:
            return 0
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        return sum(min(high, stop) - max(low, start) for low, high in self._gaps(start, stop))

    def _slab(self, memory: Tensor) -> _Slab | None:
        address = memory.data_ptr()
        at = bisect_right(self._slabs, address, key=lambda slab: slab.begin) - 1
        if at >= 0 and address + memory.numel() <= self._slabs[at].end:
            return self._slabs[at]
        return None

    def _copy_to_slab(self, memory: Tensor) -> None:
        """Copy bytes into pinned memory of exactly their size in pages, if the budget has them."""
        nbytes = -(-memory.numel() // PAGE) * PAGE
        if nbytes > self.left_bytes:
            return
        slab = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        status = self._registrar.register(slab.data_ptr(), nbytes, is_read_only=False)
        if status:
            self.counters.num_refused += 1
            self.counters.last_status = status
            return
        slab[: memory.numel()].copy_(memory)
        begin = memory.data_ptr()
        found = _Slab(begin, begin + memory.numel(), slab)
        insort(self._slabs, found, key=lambda entry: entry.begin)
        self.counters.slab_bytes += nbytes


def _page_end(memory: Tensor) -> int:
    return -(-(memory.data_ptr() + memory.numel()) // PAGE) * PAGE


def _spans(memories: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one storage, to be registered at once: no page may be registered twice."""
    span: list[Tensor] = []
    for memory in sorted(memories, key=lambda m: m.data_ptr()):
        if span:
            last = span[-1]
            end = last.data_ptr() + last.numel()
            is_same = memory.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            shares_page = memory.data_ptr() // PAGE <= (end - 1) // PAGE
            if not (shares_page or (is_same and memory.data_ptr() - end <= _JOIN_GAP)):
                yield span
                span = []
        span.append(memory)
    if span:
        yield span

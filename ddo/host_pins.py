"""Host memory that a device may read by itself, under a limit, tier by tier.

Pages of the weight files are registered where they are; what the device refuses to register is
copied to pinned slabs; what exceeds the limit goes through a pinned ring that reader threads
refill; and what even that has no room for stays pageable.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddo.host_sources import file_behind
from ddo.pin_counters import PinCounters
from ddo.registrars import Registrar
from ddo.staging import HostPiece, OpenStager, Stager, staging_size

PAGE = mmap.PAGESIZE
_JOIN_GAP = 1 << 20  # pages between two copies that are cheaper to register than to skip
_MAX_STRETCHES = 256  # into which what is pinned in part is divided: each is a registration
_MIN_STRETCH = 256 << 10


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Addresses, and the pinned memory that serves them: themselves, or a slab."""

    begin: int
    end: int
    memory: Tensor | None  # of a slab
    owner: Tensor  # keeps the pages mapped


class HostPins:
    """Pins stretches of memory until a budget is used up. Not thread-safe.

    Args:
        budget_bytes: Most bytes that are registered or held in slabs and ring at a time.
        open_stager: Makes the pinned ring; without it, what exceeds the budget is pageable.

    Attributes:
        stager: The pinned ring, if one was wanted and could be had.
    """

    def __init__(
        self, registrar: Registrar, budget_bytes: int, open_stager: OpenStager | None = None
    ) -> None:
        self.counters = PinCounters()
        self.stager: Stager | None = None
        self._registrar = registrar
        self._budget_bytes = budget_bytes
        self._open_stager = open_stager
        self._pinned: list[_Pinned] = []  # by address, never overlapping
        self._left_over: dict[int, int] = {}  # bytes that are not pinned, by address

    @property
    def left_bytes(self) -> int:
        counters = self.counters
        used = counters.registered_bytes + counters.slab_bytes + counters.ring_bytes
        return max(0, self._budget_bytes - used)

    def pin(self, memories: Iterable[Tensor], *, keep: Iterable[Tensor] = ()) -> None:
        """Pin uint8 CPU tensors as far as the budget goes.

        If it does not go all the way, every stretch of them is pinned in part, in the order in
        which they are given: in the order of use, slow bytes are spread among fast ones. Before
        that, what was pinned for others but `keep` is let go; no copy of it may be pending.
        """
        wanted = [memory for memory in memories if memory.numel()]
        kept = [memory for memory in keep if memory.numel()]
        if not kept:
            self._left_over.clear()
        spans = list(_spans(wanted, _JOIN_GAP))
        if self._cost(spans) > self.left_bytes:
            self._let_go_except([*wanted, *kept])
        if self._cost(spans) > self.left_bytes:
            self._want_stager()
            pieces = [piece for memory in wanted for piece in self.pieces(memory)]
            rest = [piece.memory for piece in pieces if not piece.is_pinned]
            spans = list(_spans(list(spread(rest, self.left_bytes)), 0))
        self._renew_slabs(wanted)
        for span in spans:
            own = _own_pages(span)
            is_partial = own != _pages(span)
            for low, high in self._gaps(*own):
                is_partial |= not self._register(low, high, span[0])
            if is_partial:
                for memory in span:
                    self._copy_to_slabs(memory)
        if any(self._unpinned_bytes(memory) for memory in wanted):
            self._want_stager()  # the device has refused more than was expected
        self._count(wanted)

    def pieces(self, memory: Tensor) -> list[HostPiece]:
        """The ways that a tensor's bytes take to the device, in order.

        A copy may not run from one registration into the next, nor from pinned to pageable.
        """
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        found: list[HostPiece] = []
        at = start
        for entry in self._overlapping(start, stop):
            if at < entry.begin:
                found.append(self._unpinned_piece(memory[at - start : entry.begin - start]))
                at = entry.begin
            end = min(stop, entry.end)
            if entry.memory is None:
                piece = memory[at - start : end - start]
            else:
                piece = entry.memory[at - entry.begin : end - entry.begin]
            found.append(HostPiece(piece, is_pinned=True))
            at = end
        if at < stop:
            found.append(self._unpinned_piece(memory[at - start :]))
        return found

    def close(self) -> None:
        """Unpin everything. No copy may be pending."""
        if self.stager is not None:
            self.stager.close()
            self.stager = None
        for entry in self._pinned:
            self._unregister(entry)
        self._pinned.clear()
        self._left_over.clear()
        counters = self.counters
        counters.registered_bytes = counters.slab_bytes = counters.ring_bytes = 0

    def _let_go_except(self, memories: Sequence[Tensor]) -> None:
        """Unpin what none of these has a byte in."""
        spans = [(span[0].data_ptr(), _page_end(span[-1])) for span in _spans(memories, 0)]
        kept: list[_Pinned] = []
        for entry in self._pinned:
            at = bisect_right(spans, entry.end - 1, key=lambda span: span[0]) - 1
            if at >= 0 and entry.begin < spans[at][1]:
                kept.append(entry)
                continue
            self._unregister(entry)
            if entry.memory is None:
                self.counters.registered_bytes -= entry.end - entry.begin
            else:
                self.counters.slab_bytes -= entry.memory.numel()
        self._pinned = kept

    def _unregister(self, entry: _Pinned) -> None:
        address = entry.begin if entry.memory is None else entry.memory.data_ptr()
        self._registrar.unregister(address)

    def _want_stager(self) -> None:
        """Open the pinned ring unless there is one, or no room for one, or the device refuses."""
        if self._open_stager is None:
            return
        size = staging_size(self.left_bytes)
        if self.stager is not None or size is None:
            return
        self.stager = self._open_stager(size)
        if self.stager is None:
            self.counters.num_refused += 1
            self._open_stager = None
        else:
            self.counters.ring_bytes = size.nbytes

    def _unpinned_piece(self, memory: Tensor) -> HostPiece:
        file = file_behind(memory) if self.stager is not None else None
        return HostPiece(memory, is_pinned=False, file=file)

    def _count(self, wanted: Sequence[Tensor]) -> None:
        for memory in wanted:
            self._left_over[memory.data_ptr()] = self._unpinned_bytes(memory)
        total, counters = sum(self._left_over.values()), self.counters
        counters.staged_bytes = total if self.stager is not None else 0
        counters.pageable_bytes = 0 if self.stager is not None else total

    def _overlapping(self, begin: int, end: int) -> Iterator[_Pinned]:
        at = max(0, bisect_right(self._pinned, begin, key=lambda entry: entry.begin) - 1)
        for entry in self._pinned[at:]:
            if entry.begin >= end:
                return
            if begin < entry.end:
                yield entry

    def _gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The parts of a range that are not pinned."""
        gaps: list[tuple[int, int]] = []
        for entry in self._overlapping(begin, end):
            if begin < entry.begin:
                gaps.append((begin, entry.begin))
            begin = entry.end
        if begin < end:
            gaps.append((begin, end))
        return gaps

    def _cost(self, spans: Sequence[Sequence[Tensor]]) -> int:
        """Bytes of the pages that registering these would take."""
        return sum(high - low for span in spans for low, high in self._gaps(*_pages(span)))

    def _unpinned_bytes(self, memory: Tensor) -> int:
        start = memory.data_ptr()
        return sum(high - low for low, high in self._gaps(start, start + memory.numel()))

    def _register(self, begin: int, end: int, owner: Tensor) -> bool:
        """Register whole pages, as many as the budget has; False if the device refuses."""
        begin, end = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        end = min(end, begin + self.left_bytes // PAGE * PAGE)
        if end <= begin:
            return True
        for is_read_only in (True, False):
            status = self._registrar.register(begin, end - begin, is_read_only=is_read_only)
            if status == 0:
                self._add(_Pinned(begin, end, None, owner))
                self.counters.registered_bytes += end - begin
                return True
            self.counters.num_refused += 1
            self.counters.last_status = status
        return False

    def _copy_to_slabs(self, memory: Tensor) -> None:
        """Copy what is not pinned yet into pinned memory, if the budget has its pages."""
        start = memory.data_ptr()
        for low, high in self._gaps(start, start + memory.numel()):
            nbytes = -(-(high - low) // PAGE) * PAGE
            if nbytes > self.left_bytes:
                return
            slab = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            status = self._registrar.register(slab.data_ptr(), nbytes, is_read_only=False)
            if status:
                self.counters.num_refused += 1
                self.counters.last_status = status
                return
            slab[: high - low].copy_(memory[low - start : high - start])
            self._add(_Pinned(low, high, slab, memory))
            self.counters.slab_bytes += nbytes

    def _renew_slabs(self, memories: Sequence[Tensor]) -> None:
        """Copy to slabs what may have been rewritten since; files are never."""
        for memory in memories:
            start = memory.data_ptr()
            for entry in self._overlapping(start, start + memory.numel()):
                if entry.memory is not None and file_behind(entry.owner) is None:
                    begin, end = (at - entry.owner.data_ptr() for at in (entry.begin, entry.end))
                    entry.memory[: end - begin].copy_(entry.owner[begin:end])

    def _add(self, entry: _Pinned) -> None:
        insort(self._pinned, entry, key=lambda other: other.begin)


def spread(memories: Sequence[Tensor], nbytes: int) -> Iterator[Tensor]:
    """Parts of `nbytes` in all, the same share of every stretch of `memories` laid end to end."""
    total = sum(memory.numel() for memory in memories)
    stretch = max(_MIN_STRETCH, -(-total // _MAX_STRETCHES))
    share = min(1.0, nbytes / total) if total else 0.0
    head = int(stretch * share) // PAGE * PAGE  # of each stretch
    position = 0
    for memory in memories:
        end = position + memory.numel()
        for begin in range(position // stretch * stretch, end, stretch):
            low, high = max(position, begin), min(end, begin + head)
            if low < high:
                yield memory[low - position : high - position]
        position = end


def _page_end(memory: Tensor) -> int:
    return -(-(memory.data_ptr() + memory.numel()) // PAGE) * PAGE


def _pages(span: Sequence[Tensor]) -> tuple[int, int]:
    """The pages in which neighbours of one storage have a byte."""
    return span[0].data_ptr() // PAGE * PAGE, _page_end(span[-1])


def _own_pages(span: Sequence[Tensor]) -> tuple[int, int]:
    """Those of them in which nobody else has one.

    A driver refuses to copy what lies on both sides of the border of a registration: on the
    heap that may be anybody's tensor.
    """
    begin, end = _pages(span)
    if file_behind(span[0]) is not None:
        return begin, end
    first, last = (memory.untyped_storage() for memory in (span[0], span[-1]))
    begin = max(begin, -(-first.data_ptr() // PAGE) * PAGE)
    end = min(end, (last.data_ptr() + last.nbytes()) // PAGE * PAGE)
    return begin, max(begin, end)


def _spans(memories: Sequence[Tensor], join_gap: int) -> Iterator[list[Tensor]]:
    """Neighbours of one storage, to be registered at once: no page may be registered twice."""
    span: list[Tensor] = []
    for memory in sorted(memories, key=lambda m: m.data_ptr()):
        if span:
            last = span[-1]
            end = last.data_ptr() + last.numel()
            is_same = memory.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            shares_page = memory.data_ptr() // PAGE <= (end - 1) // PAGE
            if not (shares_page or (is_same and memory.data_ptr() - end <= join_gap)):
                yield span
                span = []
        span.append(memory)
    if span:
        yield span

"""Weights that stay on the device: allocated, filled, bound, and given up in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ddo.blocks import Block
from ddo.metrics import Metrics
from ddo.transfer import Backend, Fence, HostCopy
from ddo.weight_files import SourceError

# Residents share allocations of about this size: torch rounds each of its own up by as much as
# 2 MiB, and what one change of the plan gives back should not be everything.
_CHUNK_BYTES = 256 << 20


@dataclass(slots=True)
class _Chunk:
    blocks: tuple[int, ...]
    memory: Tensor
    ready: Fence
    prepared: Any = None  # the copies, until they are known to be done


class Residents:
    """The chunks of a session. Guarded by the streamer's lock."""

    def __init__(self, backend: Backend, blocks: Sequence[Block], metrics: Metrics) -> None:
        self._backend = backend
        self._blocks = list(blocks)
        self._metrics = metrics
        self._chunks: list[_Chunk] = []

    @property
    def numbers(self) -> set[int]:
        """Blocks that are there, or on their way."""
        return {number for chunk in self._chunks for number in chunk.blocks}

    def upload(self, numbers: Sequence[int]) -> None:
        """Begin to bring residents to the device, in chunks."""
        for group in _groups([(n, self._blocks[n].nbytes) for n in numbers]):
            self._upload_chunk(group)

    def _upload_chunk(self, numbers: Sequence[int]) -> None:
        blocks = [self._blocks[number] for number in numbers]
        memory = self._backend.allocate(sum(block.nbytes for block in blocks))
        free, ready = self._backend.fence(), self._backend.fence()
        self._backend.record(free)  # the allocator may hand out what is still being read
        begins = _begins(block.nbytes for block in blocks)
        copies = [
            HostCopy(copy.memory, begin + copy.target_offset)
            for block, begin in zip(blocks, begins, strict=True)
            for copy in block.copies
        ]
        chunk = _Chunk(tuple(numbers), memory, ready, self._backend.prepare(copies, memory))
        self._chunks.append(chunk)
        self._backend.submit(chunk.prepared, [free], ready)
        self._metrics.uploaded_bytes += sum(copy.memory.numel() for copy in copies)

    def bind(self) -> None:
        """Let blocks be used whose copies were begun, once these are done.

        Whatever stream or thread computes with residents need not know of the copies.
        """
        for chunk in self._chunks:
            if chunk.prepared is None:
                continue
            self._backend.synchronize(chunk.ready)
            chunk.prepared = None
            blocks = [self._blocks[number] for number in chunk.blocks]
            for block, begin in zip(blocks, _begins(b.nbytes for b in blocks), strict=True):
                block.bind(block.views(chunk.memory[begin : begin + block.nbytes]))

    def keep(self, resident: set[int]) -> None:
        """Give up chunks that hold a block which is not to stay, after the work on them.

        What stays out of such a chunk moves on the device, if that has the room.
        """
        dropped = [chunk for chunk in self._chunks if not resident.issuperset(chunk.blocks)]
        if dropped:
            used = self._backend.fence()
            self._backend.record(used)
            self._backend.synchronize(used)
        for chunk in dropped:
            with suppress(SourceError):  # of bytes that nobody wants any more
                self._backend.synchronize(chunk.ready)
            moved = self._move(chunk, resident)
            for number in chunk.blocks:
                if moved is None or number not in moved.blocks:
                    self._blocks[number].unbind()
            self._chunks.remove(chunk)  # last: an interrupt before leaves it to be given up again

    def _move(self, chunk: _Chunk, resident: set[int]) -> _Chunk | None:
        """Copy the blocks that stay into a chunk of their own; None if that cannot be."""
        stays = [number for number in chunk.blocks if number in resident]
        if not stays:
            return None
        try:
            with torch.inference_mode(False):
                memory = self._backend.allocate(sum(self._blocks[n].nbytes for n in stays))
        except torch.OutOfMemoryError:
            return None  # they come from the host again
        begins = dict(
            zip(chunk.blocks, _begins(self._blocks[n].nbytes for n in chunk.blocks), strict=True)
        )
        parts = list(zip(stays, _begins(self._blocks[n].nbytes for n in stays), strict=True))
        for number, begin in parts:
            nbytes, old = self._blocks[number].nbytes, begins[number]
            memory[begin : begin + nbytes].copy_(chunk.memory[old : old + nbytes])
        moved = _Chunk(tuple(stays), memory, self._backend.fence())
        self._backend.record(moved.ready)
        self._backend.synchronize(moved.ready)
        for number, begin in parts:
            block = self._blocks[number]
            block.bind(block.views(memory[begin : begin + block.nbytes]))
        self._chunks.append(moved)
        return moved


def _begins(sizes: Iterable[int]) -> list[int]:
    """Where each of several stretches begins that lie side by side."""
    return [0, *accumulate(sizes)][:-1]


def _groups(sized: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Numbers in groups of about a chunk's size."""
    groups: list[list[int]] = []
    filled = _CHUNK_BYTES
    for number, nbytes in sized:
        if filled + nbytes > _CHUNK_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += nbytes
    return groups

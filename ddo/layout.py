"""Where bytes go: alignment, the inside of a block, the laps of a ring. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes; what the device's allocator and its kernels count on for the start of a tensor."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's bytes in a source: `key` names the source, `offset` counts its bytes."""

    key: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of one source that move together to `target_offset` of a block."""

    key: int
    offset: int
    nbytes: int
    target_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The inside of a block on the device.

    Attributes:
        offsets: First byte of each piece, in the order in which they were given.
        copies: Neighbours in source and target merged; in source order.
        nbytes: Aligned size of the block.
    """

    offsets: tuple[int, ...]
    copies: tuple[Copy, ...]
    nbytes: int


def lay_out_block(pieces: Sequence[Piece]) -> BlockLayout:
    """Place pieces so that each is aligned, and neighbours in a source are one copy if they can."""
    offsets = [0] * len(pieces)
    copies: list[Copy] = []
    end = 0
    for index in sorted(range(len(pieces)), key=lambda i: (pieces[i].key, pieces[i].offset)):
        piece = pieces[index]
        last = copies[-1] if copies else None
        if (
            last is not None
            and last.key == piece.key
            and last.offset + last.nbytes == piece.offset
            and last.nbytes % ALIGNMENT == 0
            and piece.nbytes
        ):
            offsets[index] = last.target_offset + last.nbytes
            merged = last.nbytes + piece.nbytes
            copies[-1] = Copy(last.key, last.offset, merged, last.target_offset)
            end = last.target_offset + merged
            continue
        offsets[index] = align_up(end)
        if piece.nbytes:
            copies.append(Copy(piece.key, piece.offset, piece.nbytes, offsets[index]))
        end = offsets[index] + piece.nbytes
    return BlockLayout(offsets=tuple(offsets), copies=tuple(copies), nbytes=align_up(end))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """Fixed places of blocks in a ring that they fill lap by lap.

    Attributes:
        offsets: First byte of each block, in the order of their use.
        laps: Number of blocks of each lap.
        nbytes: Size of the ring: that of its longest lap.
    """

    offsets: tuple[int, ...]
    laps: tuple[int, ...]
    nbytes: int


def lay_out_ring(sizes: Sequence[int], capacity: int) -> RingLayout | None:
    """Laps of nearly equal size, as few as `capacity` bytes allow; None if a block is larger.

    Equal laps make the last lap of a step as long as the others, so that copies run as far
    ahead across the step boundary as within a step. A short last lap would be overtaken.
    """
    if not sizes:
        return RingLayout(offsets=(), laps=(), nbytes=0)
    if max(sizes) > capacity:
        return None
    num_laps = len(_laps(sizes, capacity))
    low, high = max(*sizes, -(-sum(sizes) // num_laps)), capacity
    while low < high:
        middle = (low + high) // 2
        if len(_laps(sizes, middle)) <= num_laps:
            high = middle
        else:
            low = middle + 1
    laps = _laps(sizes, low)
    offsets: list[int] = []
    position = 0
    for num_blocks in laps:
        offset = 0
        for size in sizes[position : position + num_blocks]:
            offsets.append(offset)
            offset += size
        position += num_blocks
    return RingLayout(offsets=tuple(offsets), laps=tuple(laps), nbytes=low)


def _laps(sizes: Sequence[int], capacity: int) -> list[int]:
    """Blocks of each lap when each lap takes as many as fit."""
    laps: list[int] = []
    count = filled = 0
    for size in sizes:
        if count and filled + size > capacity:
            laps.append(count)
            count = filled = 0
        count += 1
        filled += size
    laps.append(count)
    return laps

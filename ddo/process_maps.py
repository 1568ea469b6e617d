"""What the kernel says is mapped into this process. Linux only; elsewhere nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class MappedSpan:
    """Addresses from `begin` to `end`.

    Attributes:
        offset: In the file, of the first byte.
        inode: Of the file; 0 where there is none.
        path: As the kernel writes it; empty or in brackets where there is no file.
        is_private: Whether writes stay in this process.
    """

    begin: int
    end: int
    offset: int
    inode: int
    path: str
    is_private: bool


def mapped_spans(maps: Path = MAPS) -> Iterator[MappedSpan]:
    """Every mapping, in the order of addresses, as it is now."""
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        span, permissions, offset, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(edge, 16) for edge in span.split("-"))
        yield MappedSpan(
            begin, end, int(offset, 16), int(inode), "".join(path), permissions[3] == "p"
        )

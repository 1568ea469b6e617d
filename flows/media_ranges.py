"""Byte ranges of HTTP: the one stretch of a file that a player asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` up to, and without, `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.start)


def span_of(header: str | None, size: int) -> Span | None:
    """What a `Range` header asks of a file.

    Args:
        header: The header's value, if there is one.
        size: Of the file, in bytes.

    Returns:
        None if all of it is to be sent: nothing was asked for, several ranges at a time, or what
        is no range of bytes (RFC 9110, 14.2). A span of no length cannot be satisfied.
    """
    found = None if header is None else _RANGE.fullmatch(header.strip())
    if found is None:
        return None
    first, last = found.groups()
    if first:
        if last and int(last) < int(first):
            return None
        return Span(int(first), min(int(last) + 1, size) if last else size)
    if not last:
        return None
    return Span(max(0, size - int(last)), size)

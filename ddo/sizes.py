"""Byte counts as people write them."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6,
    "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB << 10,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_nbytes(value: int | str) -> int:
    """Bytes of an amount such as `12GiB`, `1.5 GB` or a plain integer.

    Raises:
        ValueError: It is no such amount, or not positive.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{value!r} is no amount of memory; write bytes or such as '12GiB'")
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise ValueError(f"{value!r} is no amount of memory; write bytes or such as '12GiB'")
    if nbytes <= 0:
        raise ValueError(f"{value!r} is {nbytes} bytes, expected at least 1 byte")
    return nbytes


def show_nbytes(nbytes: int) -> str:
    """An amount for people: `1.50 GiB`, `12.0 MiB`, `3.4 KiB`, `300 bytes`."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if abs(nbytes) >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    if abs(nbytes) >= KIB:
        return f"{nbytes / KIB:.1f} KiB"
    return f"{nbytes} bytes"

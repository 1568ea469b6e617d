"""Byte counts for people, in one form everywhere.

`ddo.sizes` writes them alike; the flow process, which loads no `ddo`, takes them from here.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def show_nbytes(nbytes: float) -> str:
    """An amount for people: `1.50 GiB`, `12.0 MiB`, `3.4 KiB`, `300 bytes`."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if abs(nbytes) >= MIB:
        return f"{nbytes / MIB:.1f} MiB"
    if abs(nbytes) >= KIB:
        return f"{nbytes / KIB:.1f} KiB"
    return f"{nbytes:.0f} bytes"

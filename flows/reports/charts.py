"""Numbers as shapes for the page: stretches of a bar, points of a line, texts of an axis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from flows.reports.data import OTHER, Band, Line, Report, StageTotal

WIDTH, HEIGHT = 1000.0, 200.0
"""The unit of the drawings; the page stretches them to its own width."""

COLOURS = ("load", "place", "run", "write", OTHER)
"""Host phases that have a colour of their own; the others share one."""

MEMORY_NAMES = {
    "device_used_bytes": "device, all processes",
    "device_peak_allocated_bytes": "device, allocated by torch",
    "device_peak_reserved_bytes": "device, reserved by torch",
    "pinned_bytes": "pinned host memory",
    "anonymous_bytes": "anonymous host memory",
    "file_backed_bytes": "file-backed host memory",
    "locked_bytes": "locked host memory",
    "peak_rss_bytes": "host memory",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bar, from `x` on, `width` wide, in the drawing's units."""

    name: str
    kind: str
    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase's time, cut by host phase."""

    total: StageTotal
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Curve:
    """One kind of memory: unbroken lines as SVG `points`, and its highest value."""

    kind: str
    name: str
    polylines: Sequence[str]
    peak: str


@dataclass(frozen=True, slots=True)
class MemoryChart:
    """Memory over time, with the phases as bands behind it."""

    curves: Sequence[Curve]
    bands: Sequence[Piece]
    bytes_axis: Sequence[str]
    time_axis: Sequence[str]


def bars(totals: Sequence[StageTotal]) -> list[Bar]:
    """A bar for each phase; the longest one fills the width."""
    longest = max((total.elapsed_s for total in totals), default=0.0) or 1.0
    made = []
    for total in totals:
        pieces, x = [], 0.0
        for name, seconds in total.seconds.items():
            width = WIDTH * seconds / longest
            kind = name if name in COLOURS else "another"
            pieces.append(Piece(name, kind, round(x, 2), round(width, 2), duration(seconds)))
            x += width
        made.append(Bar(total, pieces))
    return made


def memory_chart(report: Report) -> MemoryChart | None:
    """The chart of a report; None if no stage told its memory."""
    moments = [at for line in report.lines for at, _ in line.points]
    moments += [at for band in report.bands for at in (band.begin, band.end)]
    highest = max((n or 0 for line in report.lines for _, n in line.points), default=0)
    if not highest or not moments:
        return None
    begin, span = min(moments), max(max(moments) - min(moments), 1e-3)
    top = _round_up(highest)
    return MemoryChart(
        curves=[_curve(line, begin, span, top) for line in report.lines],
        bands=[_band(each, begin, span) for each in report.bands],
        bytes_axis=[size(top), size(top // 2), "0"],
        time_axis=["0", duration(span / 2), duration(span)],
    )


def _curve(line: Line, begin: float, span: float, top: int) -> Curve:
    pieces: list[list[str]] = [[]]
    for at, nbytes in line.points:
        if nbytes is None:
            pieces.append([])
            continue
        x, y = WIDTH * (at - begin) / span, HEIGHT * (1 - nbytes / top)
        pieces[-1].append(f"{x:.1f},{y:.1f}")
    peak = max(nbytes or 0 for _, nbytes in line.points)
    return Curve(
        kind=line.name.removesuffix("_bytes").replace("_", "-"),
        name=MEMORY_NAMES.get(line.name, line.name),
        polylines=[" ".join(piece) for piece in pieces if piece],
        peak=size(peak),
    )


def _band(band: Band, begin: float, span: float) -> Piece:
    x, width = WIDTH * (band.begin - begin) / span, WIDTH * (band.end - band.begin) / span
    text = f"{band.stage}, {duration(band.end - band.begin)}"
    return Piece(band.stage, band.stage, round(x, 2), round(max(width, 0.5), 2), text)


def _round_up(nbytes: int) -> int:
    """A round number of bytes at or above: 1, 1.5, 2, 3, 4, 6 or 8 of a power of 1024."""
    unit = 1
    while unit * 1024 <= nbytes:
        unit *= 1024
    while unit * 10 < nbytes:
        unit *= 10
    return next(int(unit * f) for f in (1, 1.5, 2, 3, 4, 6, 8, 10) if unit * f >= nbytes)


def size(nbytes: int) -> str:
    """Bytes for people, such as `1.5 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB" if value < 1000 else f"{value:,.0f} GiB"


def duration(seconds: float) -> str:
    """Seconds for people, such as `0.42 s`, `12.3 s`, `4 min 05 s` or `2 h 03 min`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment(at: float | None) -> str:
    """A moment for people, in this machine's time zone."""
    return "unknown" if at is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))

"""A report as one HTML file that needs nothing else: no network, no other script, no server.

The page forbids itself, by its content security policy, to run any script but its own and to
fetch anything but the pictures beside it. All text goes through the template's escaping or,
in the data of the gallery, through `textContent`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flows.reports import charts
from flows.reports.data import Item, Report
from flows.reports.thumbnails import Thumbnail, data_url, thumbnails
from stages.errors import ArtifactError, RequestError
from stages.file_writes import replace_whole

ASSETS = Path(__file__).with_name("assets")
MOST_OPEN = 5
"""Failures that stand above the gallery; the others open on request."""

MOST_LISTED = 500
"""Failures and warnings that are listed; the rest is counted."""


def write_page(report: Report, path: Path, *, embed: bool = False) -> Path:
    """Write a report's page, in place of an earlier one; it appears whole or not at all.

    Args:
        embed: Carry the files themselves in the page, so that it can be sent around alone.

    Raises:
        RequestError: The page cannot be written there.
    """
    data = page(report, path.parent, embed=embed).encode("utf-8")
    try:
        replace_whole(path, data)
    except ArtifactError as error:
        raise RequestError(
            f"the report cannot be written to {path}: {error}; name another file with --output"
        ) from error
    return path


def page(report: Report, folder: Path, *, embed: bool = False) -> str:
    """The HTML of a report whose page will lie in `folder`."""
    script, style = (_asset(name) for name in ("report.js", "report.css"))
    template = _environment().get_template("report.html.j2")
    return template.render(
        report=report,
        policy=_policy(script, style),
        script=Markup(script),
        style=Markup(style),
        gallery=Markup(_json(_gallery(report, folder, embed))),
        tiles=_tiles(report),
        bars=charts.bars(report.totals),
        memory=charts.memory_chart(report),
        peaks=_peaks(report),
        most_open=MOST_OPEN,
        most_listed=MOST_LISTED,
        written=charts.moment(time.time()),
        version=metadata.version("exeunt"),
    )


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": charts.duration,
        "size": charts.size,
        "moment": charts.moment,
    }
    return made


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """What the page may do: show pictures that lie beside it, and run these two texts."""
    files = "data: 'self' file:"
    return (
        f"default-src 'none'; img-src {files}; media-src {files}; "
        f"script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _json(value: Any) -> str:
    """JSON that can stand inside of a script element, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _gallery(report: Report, folder: Path, embed: bool) -> list[dict[str, Any]]:
    """What the page's script shows of each item; numbers that a browser would round are text."""
    small = thumbnails(report.items)
    return [_shown(*pair, folder, embed) for pair in zip(report.items, small, strict=True)]


def _shown(item: Item, small: Thumbnail, folder: Path, embed: bool) -> dict[str, Any]:
    seconds = item.elapsed_s
    return {
        "name": item.name,
        "row": item.row_id,
        "type": item.media_type.partition("/")[0],
        "status": item.status,
        "cached": item.is_cached,
        "seconds": seconds,
        "took": "" if seconds is None else charts.duration(seconds),
        "prompt": item.prompt,
        "seed": "" if item.seed is None else str(item.seed),
        "error": item.error or small.problem,
        "thumbnail": small.url,
        "width": small.width,
        "height": small.height,
        "href": _href(item, folder, embed),
        "parameters": item.parameters,
        "settings": _pretty(item.settings),
    }


def _pretty(settings: Any) -> str:
    return json.dumps(settings, ensure_ascii=False, indent=2) if settings else ""


def _href(item: Item, folder: Path, embed: bool) -> str:
    """Where the file lies as seen from the page, or the file itself."""
    if item.path is None:
        return ""
    if embed and item.media_type.startswith(("image/", "video/", "audio/")):
        try:
            return data_url(item.path.read_bytes(), item.media_type)
        except OSError:
            return ""
    relative = os.path.relpath(item.path, folder)
    return "./" + quote(os.fsencode(relative))  # never taken for a scheme such as `javascript:`


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    text: str


def _tiles(report: Report) -> list[_Tile]:
    """The few numbers that come first."""
    num_done = sum(item.status == "done" for item in report.items)
    num_made = sum(total.num_made for total in report.totals)
    num_found = sum(total.num_found for total in report.totals)
    tiles = [_Tile("files" if _has_other_media(report.items) else "pictures", f"{num_done:,}")]
    if report.failures:
        tiles.append(_Tile("failed", f"{len(report.failures):,}"))
    if report.totals:
        tiles.append(_Tile("stage requests run", f"{num_made:,}"))
        tiles.append(_Tile("found in the store", f"{num_found:,}"))
    if report.begin is not None and report.end is not None:
        tiles.append(_Tile("from start to end", charts.duration(report.end - report.begin)))
    if num_made:
        seconds = sum(total.elapsed_s for total in report.totals)
        tiles.append(_Tile("in stages", charts.duration(seconds)))
    peaks = _peaks(report)
    for name in ("device_used_bytes", "device_peak_allocated_bytes", "peak_rss_bytes"):
        if name in peaks:
            tiles.append(_Tile(f"peak: {charts.MEMORY_NAMES[name]}", charts.size(peaks[name])))
            break
    return tiles


def _has_other_media(items: Sequence[Item]) -> bool:
    return any(not item.media_type.startswith("image/") for item in items if item.media_type)


def _peaks(report: Report) -> dict[str, int]:
    """The largest value of each kind of memory over all phases."""
    peaks: dict[str, int] = {}
    for total in report.totals:
        for name, nbytes in total.peaks.items():
            peaks[name] = max(peaks.get(name, 0), nbytes)
    return peaks

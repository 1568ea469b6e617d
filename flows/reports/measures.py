"""Out of the stages' own reports: what each phase took, memory over time, what fell back."""

from __future__ import annotations

import json
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from flows.reports.data import OTHER, Band, Found, Line, StageTotal
from stages.contracts import StageName

logger = logging.getLogger(__name__)

STAGES = get_args(StageName)
MOST_POINTS = 600
"""Points of a line: more than a screen shows; of several in one place the highest is kept."""

MOST_GAP_S = 1.0
"""A line is broken where no stage worked for longer than this."""

_NOT_SHOWN = frozenset(("offload", "tokens", "checkpoints", "blocks", "label", "request_digest"))

StageReport = Mapping[str, Any]


def read_stage_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports in a run's folder, as far as a page shows them, in the order of writing."""
    return [slimmed(report) for report in stage_reports(folder)]


def stage_reports(folder: Path) -> Iterator[dict[str, Any]]:
    """The reports in a run's folder, one after the other, in the order of writing."""
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            logger.warning("a stage's report is left out: %s: %s", path, error)
            continue
        if isinstance(document, dict) and "stage" in document:
            yield document


def slimmed(report: StageReport) -> dict[str, Any]:
    """A report without what a page does not show: a batch has tens of thousands of them."""
    components = {
        name: {key: each[key] for key in ("fallbacks", "pins") if key in each}
        for name, each in report.get("offload", {}).get("components", {}).items()
    }
    kept = {name: value for name, value in report.items() if name not in _NOT_SHOWN}
    return {**kept, "offload": {"components": components}} if components else kept


def stage_totals(reports: Sequence[StageReport], found: Sequence[Found]) -> list[StageTotal]:
    """What each phase took, in the order in which phases run."""
    made: dict[str, list[StageReport]] = defaultdict(list)
    for report in reports:
        made[report["stage"]].append(report)
    num_found = Counter(each.stage for each in found)
    names = sorted({*made, *num_found}, key=_order)
    return [_total(name, made[name], num_found[name]) for name in names]


def _order(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)


def _total(stage: str, reports: Sequence[StageReport], num_found: int) -> StageTotal:
    seconds: dict[str, float] = {}
    for report in reports:
        own = outer_phases(report)
        for name, elapsed_s in own.items():
            seconds[name] = seconds.get(name, 0.0) + elapsed_s
    if OTHER in seconds:
        seconds[OTHER] = seconds.pop(OTHER)  # last
    steps = [s for r in reports if (s := r.get("steps", {}).get("median_s")) is not None]
    peaks: dict[str, int] = {}
    for report in reports:
        for name, nbytes in memory_of(report).items():
            peaks[name] = max(peaks.get(name, 0), nbytes)
    return StageTotal(
        stage=stage,
        num_made=len(reports),
        num_found=num_found,
        seconds=seconds,
        median_s=statistics.median(r["elapsed_s"] for r in reports) if reports else None,
        median_step_s=statistics.median(steps) if steps else None,
        peaks=peaks,
    )


def outer_phases(report: StageReport) -> dict[str, float]:
    """Seconds of each host phase that lies in no other one, and of what lies in none."""
    seconds: dict[str, float] = {}
    end = -1.0
    phases = sorted(report.get("host_phases", ()), key=lambda p: (p["start_s"], -p["elapsed_s"]))
    for phase in phases:
        if phase["start_s"] < end:
            continue
        end = phase["start_s"] + phase["elapsed_s"]
        seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + phase["elapsed_s"]
    seconds[OTHER] = max(0.0, report["elapsed_s"] - sum(seconds.values()))
    return seconds


def memory_of(report: StageReport) -> dict[str, int]:
    """Peaks of one request, as far as they were measured, in bytes."""
    peaks = {
        name: int(value)
        for name, value in report.get("memory", {}).items()
        if isinstance(value, int)
    }
    for name, values in report.get("memory_samples", {}).items():
        if name != "at_s" and values:
            peaks[name] = max(peaks.get(name, 0), *values)
    pinned = sum(_pinned_bytes(each) for each in _offloaded(report))
    return {**peaks, "pinned_bytes": pinned} if pinned else peaks


def _offloaded(report: StageReport) -> list[Mapping[str, Any]]:
    return list(report.get("offload", {}).get("components", {}).values())


def _pinned_bytes(offload: Mapping[str, Any]) -> int:
    pins = offload.get("pins") or {}
    names = ("registered_bytes", "slab_bytes", "ring_bytes")
    return sum(int(pins.get(name) or 0) for name in names)


def fallbacks_of(reports: Iterable[StageReport]) -> Counter[str]:
    """What was not done in the best way, in sentences, and how many requests said so."""
    told: Counter[str] = Counter()
    for report in reports:
        told.update(str(each) for each in report.get("fallbacks", ()))
        for name, offload in report.get("offload", {}).get("components", {}).items():
            for each in offload.get("fallbacks", ()):
                told[f"{report['stage']}, {name}: {each['what']}: {each['reason']}"] += 1
    return told


def bands_of(reports: Sequence[StageReport]) -> list[Band]:
    """When each phase worked: neighbours in time of one phase are one band."""
    spans = sorted(
        (float(r["started_at"]), float(r["started_at"]) + float(r["elapsed_s"]), str(r["stage"]))
        for r in reports
        if "started_at" in r
    )
    bands: list[Band] = []
    for begin, end, stage in spans:
        before = bands[-1] if bands else None
        if before and before.stage == stage and begin - before.end < MOST_GAP_S:
            bands[-1] = Band(stage=stage, begin=before.begin, end=max(end, before.end))
        else:
            bands.append(Band(stage=stage, begin=begin, end=end))
    return bands


def memory_lines(reports: Sequence[StageReport]) -> list[Line]:
    """Memory over time: one line for each kind, through all stages."""
    series: dict[str, list[tuple[float, int | None]]] = defaultdict(list)
    timed = [r for r in reports if "started_at" in r and r.get("memory_samples", {}).get("at_s")]
    previous_end = None
    for report in sorted(timed, key=lambda r: r["started_at"]):
        samples, began = report["memory_samples"], float(report["started_at"])
        names = [name for name in samples if name != "at_s"]
        if previous_end is not None and began - previous_end > MOST_GAP_S:
            for name in names:
                series[name].append(((previous_end + began) / 2, None))
        for name in names:
            pairs = zip(samples["at_s"], samples[name], strict=False)
            series[name] += [(began + at_s, int(nbytes)) for at_s, nbytes in pairs]
        previous_end = began + float(report["elapsed_s"])
    return [
        Line(name=name, points=_thinned(points))
        for name, points in sorted(series.items())
        if any(nbytes for _, nbytes in points)
    ]


def _thinned(points: Sequence[tuple[float, int | None]]) -> list[tuple[float, int | None]]:
    """At most `MOST_POINTS`: of each stretch of time the highest point, and every gap."""
    if len(points) <= MOST_POINTS:
        return list(points)
    begin, end = points[0][0], points[-1][0]
    width = max((end - begin) / MOST_POINTS, 1e-9)
    highest: dict[tuple[int, bool], tuple[float, int | None]] = {}
    for at, nbytes in points:
        key = (int((at - begin) / width), nbytes is None)
        kept = highest.get(key)
        if kept is None or (nbytes or 0) > (kept[1] or 0):
            highest[key] = (at, nbytes)
    return sorted(highest.values(), key=lambda point: point[0])

"""The rows of a dataset's two tables: requests of stages, and files that were saved.

`docs/reference/reports.md` describes each column. The family and the date are no columns of the
files: they are in the names of their folders, as partitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from flows.reports.measures import fallbacks_of, memory_of, outer_phases
from flows.reports.of_run import items_of, saved_lines

SCHEMA = "exeunt.report-dataset/1"
REQUESTS, FILES = "requests", "files"

PEAKS = (
    *("peak_rss_bytes", "anonymous_bytes", "file_backed_bytes", "pinned_bytes"),
    *("device_used_bytes", "device_peak_allocated_bytes", "device_peak_reserved_bytes"),
)

Document = Mapping[str, Any]


def schema(table: str) -> Any:
    """The Arrow schema of a table."""
    import pyarrow as pa

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    when = pa.timestamp("us", tz="UTC")
    if table == REQUESTS:
        columns = {
            "run_id": text, "stage": text, "label": text, "request_digest": text,
            "cached": pa.bool_(), "began_at": when, "elapsed_s": number, "task": text,
            "model": text, "offload": text, "dtype": text, "device": text, "device_name": text,
            "host": text, "pid": whole, "num_steps": whole, "num_steps_run": whole,
            "median_step_s": number, "resumed_from_step": whole,
            "host_phases_s": pa.map_(text, number), **dict.fromkeys(PEAKS, whole),
            "versions": pa.map_(text, text), "warnings": pa.list_(text),
            "fallbacks": pa.list_(text), "report": text,
        }  # fmt: skip
    else:
        columns = {
            "run_id": text, "path": text, "media_type": text, "digest": text, "cached": pa.bool_(),
            "elapsed_s": number, "saved_at": when, "prompt": text, "negative_prompt": text,
            "seed": pa.uint64(), "height": whole, "width": whole, "num_inference_steps": whole,
            "guidance_scale": number, "model": text, "scheduler": text, "settings": text,
        }  # fmt: skip
    return pa.schema(list(columns.items()))


def request_rows(
    run_id: str, header: Document, lines: Iterable[Document], reports: Iterable[Document]
) -> Iterator[dict[str, Any]]:
    """A row for each request of a run: first those that were found, then those that ran."""
    about = {name: header.get(name) for name in ("task", "model", "offload", "dtype", "device")}
    about |= {"run_id": run_id, "host": header.get("host")}
    for line in lines:
        if line["event"] == "request" and line.get("cached"):
            yield about | _found(line)
    for report in reports:
        yield about | _made(report)


def _found(line: Document) -> dict[str, Any]:
    return {
        "stage": line["stage"],
        "label": line.get("label"),
        "request_digest": line["request_digest"],
        "cached": True,
        "began_at": _moment(line["at"] - line["elapsed_s"]),
        "elapsed_s": line["elapsed_s"],
    }


def _made(report: Document) -> dict[str, Any]:
    steps = report.get("steps", {})
    peaks = memory_of(report)
    row = {
        name: report.get(name)
        for name in (
            *("stage", "label", "request_digest", "elapsed_s", "dtype", "device", "device_name"),
            *("host", "pid", "resumed_from_step"),
        )
    }
    return row | {
        "cached": False,
        "began_at": _moment(report["started_at"]),
        "num_steps": steps.get("num_steps"),
        "num_steps_run": steps.get("num_run"),
        "median_step_s": steps.get("median_s"),
        "host_phases_s": list(outer_phases(report).items()),
        **{name: peaks.get(name) for name in PEAKS},
        "versions": list(report.get("versions", {}).items()),
        "warnings": list(report.get("warnings", ())),
        "fallbacks": list(fallbacks_of([report])),
        "report": json.dumps(report, ensure_ascii=False),
    }


def file_rows(run_id: str, lines: Sequence[Document]) -> Iterator[dict[str, Any]]:
    """A row for each file that a run has saved."""
    saved = saved_lines(lines)
    requests = [line for line in lines if line["event"] == "request"]
    for (path, line), item in zip(saved.items(), items_of(lines, requests), strict=True):
        settings = item.settings
        yield {
            "run_id": run_id,
            "path": path,
            "media_type": item.media_type,
            "digest": line.get("digest"),
            "cached": item.is_cached,
            "elapsed_s": item.elapsed_s,
            "saved_at": _moment(line["at"]),
            "prompt": item.prompt,
            "negative_prompt": settings.get("negative_prompt"),
            "seed": item.seed,
            **{
                name: settings.get(name)
                for name in ("height", "width", "num_inference_steps", "guidance_scale")
            },
            "model": settings.get("model"),
            "scheduler": settings.get("scheduler"),
            "settings": json.dumps(dict(settings), ensure_ascii=False) if settings else None,
        }


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

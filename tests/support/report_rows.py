"""Rows of a batch as its results hold them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from flows.batch.results import RowResult
from tests.support.report_runs import BEGAN, RUN_ID


def good_row(number: int, **fields: Any) -> RowResult:
    """A row that has its file, of the last start."""
    name = f"{number:06d}"
    made: dict[str, Any] = {
        "run_id": RUN_ID,
        "file": f"{name}.png",
        "media_type": "image/png",
        "file_bytes": 100,
        "prompt": f"fox {number}",
        "seed": number,
        "seconds": {"denoise": 3.0, "decode": 1.0},
        "peak_host_bytes": 2048,
        "picture_sha256": f"digest {number}",
    }
    return _row(number, "done", made | fields)


def failed_row(number: int, status: Any = "failed", **fields: Any) -> RowResult:
    """A row without a file, and why."""
    why = {"error_type": "StageFailed", "error": "latents are NaN at step 3 of 8", "seed": number}
    return _row(number, status, why | fields)


def _row(number: int, status: Any, fields: dict[str, Any]) -> RowResult:
    when = datetime.fromtimestamp(BEGAN + number, UTC)
    told = {"id": f"{number:06d}", "row": number, "status": status, "finished_at": when}
    return RowResult(**told | fields)

"""How long a batch still takes, and how it is told; no flow, no process."""

from __future__ import annotations

import io
import json

import pytest

from flows.batch.display import BatchJson, RowDisplay, to_stream
from flows.batch.live import BatchLive
from flows.batch.pace import Pace, spoken
from flows.batch.progress import Plan
from flows.batch.results import RowResult
from flows.batch.row_work import RowWork
from flows.batch.rows import PreparedRow

DONE = RowResult(id="fox", row=1, status="done", file="fox.png")
FAILED = RowResult(id="owl", row=2, status="failed", error_type="BorderError", error="NaN \x1b[1m")


def test_what_is_left_follows_what_was_measured() -> None:
    pace = Pace(10)
    assert pace.left_s() is None
    for _ in range(10):
        pace.passes("encode", 0.5)
    pace.passes("denoise", 2.0)
    assert pace.left_s() is None  # nobody knows what decode takes
    pace.passes("decode", 1.0)
    assert pace.left_s() == pytest.approx(9 * 2.0 + 9 * 1.0)


def test_a_forecast_counts_until_its_stage_is_measured() -> None:
    pace = Pace(10, {"encode": 1.0, "denoise": 5.0, "decode": 1.0})
    assert pace.left_s() == pytest.approx(70.0)
    pace.passes("encode", 3.0)
    assert pace.left_s() == pytest.approx(9 * 3.0 + 10 * 5.0 + 10 * 1.0)


def test_the_newest_rows_weigh_most() -> None:
    pace = Pace(1_000, {"decode": 1.0})
    for elapsed_s in [1.0] * 100 + [4.0] * 200:
        pace.passes("decode", elapsed_s)
    assert pace.left_s() == pytest.approx(700 * 4.0, rel=0.02)


def test_when_all_rows_ended_nothing_is_left() -> None:
    pace = Pace(2)
    pace.passes("encode", 1.0)
    pace.ends()
    assert pace.left_s() is None
    pace.ends()  # both failed before they were decoded
    assert pace.left_s() == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0 s"), (89, "89 s"), (150, "2 min"), (5400, "1 h 30 min")],
)
def test_times_are_short_to_read(seconds: float | None, text: str) -> None:
    assert spoken(seconds) == text


def test_plain_lines_tell_the_plan_each_row_and_what_is_left() -> None:
    stream = io.StringIO()
    display = to_stream(stream)
    display.batch_begins(Plan(num_rows=5, num_open=2, num_bad=1))
    display.phase_begins("decode", 2)
    display.request_ends("decode", "fox", cached=False, elapsed_s=0.5)
    display.row_ends(DONE)
    display.row_ends(FAILED)
    display.batch_ends()
    lines = stream.getvalue().splitlines()
    assert lines[:4] == [
        "5 rows: 2 to run, 2 finished before, 1 bad",
        "decode    2 rows",
        "row fox done: fox.png",
        "row owl failed: BorderError: NaN \\x1b[1m",
    ]
    assert lines[4].startswith("decode 1/2, 2 of 2 rows, 1 failed, ")


def test_json_lines_tell_rate_and_time_left_with_each_row() -> None:
    stream = io.StringIO()
    display = BatchJson(stream)
    display.batch_begins(Plan(num_rows=2, num_open=2, num_bad=0, forecast_s={"decode": 4.0}))
    display.phase_begins("decode", 2)
    display.request_ends("decode", "fox", cached=True, elapsed_s=0.5)
    display.row_ends(DONE)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [each["event"] for each in events] == [
        *("batch_begins", "phase_begins", "request_ends", "row_ends")
    ]
    assert events[-1] | {"rows_per_s": 0} == {
        **{"event": "row_ends", "id": "fox", "row": 1, "status": "done", "file": "fox.png"},
        **{"error_type": None, "error": None, "stage": "decode", "num_in_stage": 1},
        **{"num_requests": 2, "num_ended": 1, "num_rows": 2, "num_failed": 0},
        **{"rows_per_s": 0, "left_s": 0.5},
    }


def test_a_terminal_shows_the_batch_and_its_phase_and_what_failed() -> None:
    stream = io.StringIO()
    display = BatchLive(stream)
    with display.shown():
        display.checks(100)
        display.batch_begins(Plan(num_rows=2, num_open=2, num_bad=0))
        display.phase_begins("denoise", 2)
        display.step("denoise", "fox \x1b[31m", "running", 1, 8)
        display.request_ends("denoise", "fox", cached=False, elapsed_s=0.5)
        display.row_ends(FAILED)
        display.phase_ends("denoise")
        display.batch_ends()
    text = stream.getvalue()
    assert "2 rows: 2 to run" in text and "row owl failed: NaN \\x1b[1m" in text
    assert "\x1b[31m" not in text


def test_a_warning_belongs_to_its_row_and_is_told_once() -> None:
    row = PreparedRow(
        number=1, id="fox", arguments={}, own={}, file_name="fox.png", seed=1, digest="d"
    )
    work, stream = RowWork(row), io.StringIO()
    display = RowDisplay(to_stream(stream), lambda: work)
    for _ in range(3):  # its flow starts anew in every phase
        display.warn("the prompt is cut")
    assert stream.getvalue() == "warning: row fox: the prompt is cut\n"
    assert work.failed(ValueError("x"), "run").warnings == ("the prompt is cut",)

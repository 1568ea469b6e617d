"""A batch's page in Prefect costs the same for ten rows and for ten thousand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from flows.batch import page as page_module
from flows.batch.display import BatchLines
from flows.batch.journal import Journal
from flows.batch.page import MOST_BAD, MOST_LISTED, BatchPage
from flows.batch.progress import Plan
from flows.batch.results import RowResult
from flows.settings import RunSettings

NUM_ROWS = 1_000
FIRST_BAD = 300


class Shown:
    """Takes what a page puts onto it."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.num_put: Counter[str] = Counter()

    def put(self, kind: str, key: str, data: Any, description: str) -> None:
        self.num_put[key] += 1
        self.latest[key] = kind, data, description


def result(row: int, status: Literal["done", "failed"] = "done") -> RowResult:
    return RowResult(
        id=f"r{row}",
        row=row,
        status=status,
        picture_sha256=f"{row:064x}" if status == "done" else None,
        media_type="image/png",
        prompt=f"fox | {row}",
        seed=2**53 + row,
        error=None if status == "done" else "too \x1b[31m hot",
    )


def run_rows(folder: Path, shown: Shown, store_url: str) -> list[str]:
    """A batch of a thousand rows as its page is told of it; what its display said."""
    lines: list[str] = []
    settings = RunSettings.from_env({"EXEUNT_HOME": str(folder), "EXEUNT_STORE": store_url})
    display = BatchLines(lambda text, _: lines.append(text))
    with (
        Journal.open(folder / "out") as journal,
        BatchPage(display, journal, settings, shown.put) as page,
    ):
        page.batch_begins(Plan(num_rows=NUM_ROWS, num_open=NUM_ROWS, num_bad=0))
        page.phase_begins("decode", NUM_ROWS)
        for row in range(1, NUM_ROWS + 1):
            page.request_ends("decode", "", cached=False, elapsed_s=0.1)
            ended = result(row, "failed" if row >= FIRST_BAD and row % 2 else "done")
            journal.add(ended)
            page.row_ends(ended)
        page.phase_ends("decode")
        page.batch_ends()
    return lines


def test_a_page_shows_bad_rows_first_and_no_more_than_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "EVERY_S", 3600.0)
    shown = Shown()
    lines = run_rows(tmp_path, shown, "https://pictures.example/store")
    assert shown.num_put == {"progress-batch": 1, "rows": 1, "gallery": 1}
    assert sum(line.startswith("row ") for line in lines) == NUM_ROWS
    assert shown.latest["progress-batch"][:2] == ("progress", 100.0)
    kind, data, description = shown.latest["rows"]
    table = json.loads(data)
    assert kind == "table" and len(table) == MOST_BAD + MOST_LISTED and len(data) < 100_000
    assert description == "650 done, 350 failed; 250 of them are listed, bad ones first"
    assert [line["row"] for line in table[:2]] == [301, 303]
    assert [line["row"] for line in table[MOST_BAD:]] == list(range(1, MOST_LISTED + 1))
    assert table[0]["file or error"] == "too \\x1b[31m hot"
    assert table[-1]["seed"] == str(2**53 + MOST_LISTED)  # exact, where a browser would round
    kind, data, _ = shown.latest["gallery"]
    assert kind == "markdown" and data.count("![") == 60
    assert f"[r1](https://pictures.example/store/objects/sha256/00/{1:064x})" in data


def test_a_long_batch_brings_its_page_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "EVERY_S", 0.0)
    shown = Shown()
    run_rows(tmp_path, shown, "")
    assert shown.num_put["progress-batch"] >= 2
    assert "gallery" not in shown.latest  # nothing serves this store


def test_a_server_in_trouble_does_not_end_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no server")

    shown = Shown()
    monkeypatch.setattr(shown, "put", refuse)
    assert len(run_rows(tmp_path, shown, "")) > NUM_ROWS
    assert "the batch's page does not show its end: OSError('no server')" in caplog.text


def test_a_batch_that_is_refused_has_no_page(tmp_path: Path) -> None:
    shown = Shown()
    settings = RunSettings.from_env({"EXEUNT_HOME": str(tmp_path)})
    display = BatchLines(lambda text, _: None)
    with (
        pytest.raises(ValueError, match="crooked"),
        Journal.open(tmp_path / "out") as journal,
        BatchPage(display, journal, settings, shown.put),
    ):
        raise ValueError("crooked")
    assert not shown.latest

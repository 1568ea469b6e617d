"""A batch's report is by row: what each became, why it failed, and how the forecast held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.batch import results
from flows.reports.of_batch import batch_report
from flows.reports.page import page
from stages.errors import RequestError
from tests.flows.reports.test_page import items_in
from tests.support.report_rows import failed_row, good_row
from tests.support.report_runs import RUN_ID, RecordedRun, stage_report

BAD_SIZE = "height 777 is no multiple of 16"
FORECAST = {
    "run_id": RUN_ID,
    "num_rows": 3,
    "seconds": {"denoise": 2.0, "decode": 1.0},
    "elapsed_s": 9.0,
    "host_bytes": 4096,
    "device_bytes": 0,
    "disks": [{"need_bytes": 3 << 20}],
}


class RecordedBatch:
    """An output folder of three good rows, one that failed and one that never ran.

    Attributes:
        run: Its run's journal and reports.
    """

    def __init__(self, root: Path, num_rows: int = 5) -> None:
        self.run, self.reports = RecordedRun(root), root / "reports"
        self.output = self.run.pictures
        for number in (1, 2, 3):
            self.run.picture(f"{number:06d}.png", f"fox {number}", digest=f"digest {number}")
        self.run.report(stage_report("denoise", fallbacks=["decoded in tiles"]))
        self.run.request("encode", "x", cached=True)
        self.run.journal.write("warning", message="row 000002: the prompt is cut")
        self.run.journal.write("warning", message="the disk is nearly full")
        self.rows = [
            good_row(1),
            good_row(2, seed=2**64 - 1, warnings=("the prompt is cut",)),
            good_row(3, cached=True, seconds={}),
            failed_row(4, phase="denoise", run_id=RUN_ID, prompt="a crow", seed=4),
            failed_row(5, "invalid", error_type="RequestError", error=BAD_SIZE),
        ]
        self.about: dict[str, Any] = {
            "family": "z-image",
            "table": "/tables/night.csv",
            "num_rows": num_rows,
            "run_id": RUN_ID,
            "forecast": FORECAST,
        }

    def write(self) -> None:
        results.write(self.output, self.rows, self.about)


@pytest.fixture
def batch(tmp_path: Path) -> RecordedBatch:
    made = RecordedBatch(tmp_path)
    made.write()
    return made


def test_each_row_is_shown_as_what_became_of_it(batch: RecordedBatch) -> None:
    report = batch_report(batch.output, batch.reports)
    shown = [(item.row_id, item.status, item.is_cached, item.elapsed_s) for item in report.items]
    assert shown == [
        ("000001", "done", False, 4.0),
        ("000002", "done", False, 4.0),
        ("000003", "done", True, 0),
        ("000004", "failed", False, None),
        ("000005", "invalid", False, None),
    ]
    assert report.items[1].seed == 2**64 - 1
    assert report.items[0].parameters == "fox 1\nSteps: 4, Seed: 0"
    assert report.items[3].settings["prompt"] == "a crow"
    assert (report.title, report.state) == ("z-image: 5 rows of night.csv", "failed")
    assert report.facts["rows"] == "3 done, 1 failed, 1 invalid"


def test_failures_say_the_row_the_phase_and_the_reason(batch: RecordedBatch) -> None:
    first, second = batch_report(batch.output, batch.reports).failures
    assert (first.what, first.stage, first.kind) == ("000004", "denoise", "StageFailed")
    assert (second.what, second.stage) == ("000005", "")
    assert second.reason == BAD_SIZE


def test_stages_memory_and_warnings_come_from_the_runs(batch: RecordedBatch) -> None:
    report = batch_report(batch.output, batch.reports)
    assert [(t.stage, t.num_made, t.num_found) for t in report.totals] == [
        ("encode", 0, 1),
        ("denoise", 1, 0),
    ]
    assert report.fallbacks == {"decoded in tiles": 1} and len(report.lines) == 1
    assert report.warnings == {"the prompt is cut": 1, "the disk is nearly full": 1}


def test_the_forecast_stands_beside_what_happened(batch: RecordedBatch) -> None:
    told = {each.name: each for each in batch_report(batch.output, batch.reports).forecast}
    assert (told["denoise, a row"].forecast, told["denoise, a row"].happened) == (
        "2.00 s",
        "3.00 s",
    )
    assert told["denoise, a row"].share == "150%" and told["decode, a row"].share == "100%"
    assert told["in stages, 4 rows"].happened == "8.00 s"
    assert told["host memory of a stage"].share == "50%"
    assert "device memory" not in told
    journal = sum(path.stat().st_size for path in batch.run.folder.iterdir())
    assert told["disk, all rows"].share == f"{(journal + 300) / (3 << 20):.0%}"


def test_rows_that_other_starts_have_run_are_not_compared(batch: RecordedBatch) -> None:
    batch.about |= {"forecast": FORECAST | {"run_id": "another"}}
    batch.write()
    report = batch_report(batch.output, batch.reports)
    assert report.forecast == []
    assert "Forecast and what happened" not in page(report, batch.output)


def test_a_batch_that_was_killed_in_its_first_chunk_is_read_from_its_journal(
    tmp_path: Path,
) -> None:
    batch = RecordedBatch(tmp_path)
    lines = [{"event": "batch", "schema": "exeunt.batch/1", "key": "k"}]
    again = failed_row(1).to_json()
    told = [again, *(each.to_json() for each in batch.rows[1::-1])]
    lines += [{"event": "row", "digest": "", "result": each} for each in told]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"event": "row", "resu'
    (batch.output / "batch.jsonl").write_text(text)
    report = batch_report(batch.output, batch.reports)
    assert [(item.row_id, item.status) for item in report.items] == [
        ("000001", "done"),
        ("000002", "done"),
    ]
    assert report.state == "unfinished"


def test_rows_that_have_not_run_are_counted(tmp_path: Path) -> None:
    batch = RecordedBatch(tmp_path, num_rows=9)
    batch.write()
    report = batch_report(batch.output, batch.reports)
    assert report.state == "unfinished" and report.facts["rows"].endswith("4 not yet run")


def test_a_batch_of_another_machine_has_its_gallery(batch: RecordedBatch, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    batch.output.rename(moved)
    report = batch_report(moved, tmp_path / "no reports here")
    assert report.facts["missing"] == "reports of 1 runs are not kept here"
    shown = items_in(page(report, moved))
    assert [each["href"] for each in shown][:1] == ["./000001.png"] and shown[0]["thumbnail"]
    assert json.loads(str(shown[0]["settings"]))["seed"] == 1
    again = batch_report(moved, batch.reports)  # the pictures have moved, the reports have not
    assert again.items[0].parameters == "fox 1\nSteps: 4, Seed: 0"


def test_results_that_cannot_be_read_are_a_clear_error(batch: RecordedBatch) -> None:
    (batch.output / results.NAME).write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"results of the batch in .* cannot be read"):
        batch_report(batch.output, batch.reports)


def test_the_command_takes_a_batchs_folder(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = RecordedBatch(home)
    batch.write()
    monkeypatch.chdir(batch.output.parent)
    assert cli.main(["report", batch.output.name]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == batch.output / "report.html"
    html = path.read_text(encoding="utf-8")
    assert "2 failed" in html and "height 777" in html and "as in the table" in html
    dataset = tmp_path / "data"
    assert cli.main(["report", str(batch.output), "--dataset", str(dataset)]) == 0
    assert len(list(dataset.rglob("*.parquet"))) == 2

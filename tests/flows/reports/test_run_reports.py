"""A run's report says what its journal and its stages say, also of a run that was cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flows import cli
from flows.reports.data import OTHER
from flows.reports.journal import Journal, read_journal
from flows.reports.measures import MOST_POINTS, outer_phases
from flows.reports.of_run import find_run, run_report
from stages.errors import RequestError
from tests.support.report_runs import BEGAN, RecordedRun, stage_report


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path)


def phase(run: RecordedRun, stage: str, num_requests: int = 1) -> None:
    run.journal.write("phase_begins", stage=stage, num_requests=num_requests)
    run.journal.write("phase_ends", stage=stage)


def test_an_item_took_what_its_own_stages_took(run: RecordedRun) -> None:
    run.request("decode", "a", cached=False, elapsed_s=2.5)
    run.request("decode", "b", cached=True, elapsed_s=0.1)
    run.picture("a.png", "a fox", digest="a", seed=2**64 - 1)
    run.picture("b.png", "a crow", digest="b")
    made, found = run_report(run.folder).items
    assert (made.elapsed_s, made.is_cached, made.seed) == (2.5, False, 2**64 - 1)
    assert (found.elapsed_s, found.is_cached, found.prompt) == (0, True, "a crow")


def test_a_file_without_settings_is_listed_too(run: RecordedRun) -> None:
    run.journal.write("saved", path=str(run.pictures / "clip.mp4"))
    (item,) = run_report(run.folder).items
    assert (item.name, item.media_type, item.prompt) == ("clip.mp4", "video/mp4", "")


def test_time_is_counted_once_where_phases_lie_in_each_other() -> None:
    assert outer_phases(stage_report("encode")) == {"load": 1.0, "run": 2.5, OTHER: 0.5}


def test_totals_count_what_ran_and_what_was_found(run: RecordedRun) -> None:
    run.report(stage_report("decode"))
    run.report(stage_report("encode", memory={"peak_rss_bytes": 5000}))
    run.report(stage_report("encode", elapsed_s=6.0))
    run.request("encode", "x", cached=True)
    encode, decode = run_report(run.folder).totals
    assert (encode.stage, encode.num_made, encode.num_found) == ("encode", 2, 1)
    assert encode.seconds == {"load": 2.0, "run": 5.0, OTHER: 3.0}
    assert (encode.elapsed_s, encode.median_s) == (10.0, 5.0)
    assert encode.peaks["peak_rss_bytes"] == 5000 and decode.num_found == 0


def test_memory_is_one_line_with_a_gap_where_no_stage_worked(run: RecordedRun) -> None:
    run.report(stage_report("encode"))
    run.report(stage_report("denoise", began=BEGAN + 60))
    report = run_report(run.folder)
    (line,) = report.lines
    assert [nbytes for _, nbytes in line.points] == [100, 700, 300, None, 100, 700, 300]
    assert [at - BEGAN for at, _ in line.points] == [0, 2, 3.5, 32, 60, 62, 63.5]
    assert [(band.stage, band.end - band.begin) for band in report.bands] == [
        ("encode", 4.0),
        ("denoise", 4.0),
    ]


def test_a_long_line_keeps_its_peak(run: RecordedRun) -> None:
    values = [100] * 5000
    values[3333] = 999
    samples = {"at_s": [n / 10 for n in range(5000)], "anonymous_bytes": values}
    run.report(stage_report("denoise", memory_samples=samples, elapsed_s=500.0))
    (line,) = run_report(run.folder).lines
    assert len(line.points) <= MOST_POINTS + 1
    assert max(nbytes or 0 for _, nbytes in line.points) == 999


def test_fallbacks_and_warnings_are_told_once_with_their_number(run: RecordedRun) -> None:
    offload = {"components": {"vae": {"fallbacks": [{"what": "pins", "reason": "refused"}]}}}
    for _ in range(3):
        run.report(stage_report("decode", fallbacks=["decoded in tiles"], offload=offload))
        run.journal.write("warning", message="the prompt is cut")
    report = run_report(run.folder)
    assert report.fallbacks == {"decoded in tiles": 3, "decode, vae: pins: refused": 3}
    assert report.warnings == {"the prompt is cut": 3}


def test_a_failure_says_what_where_and_why(run: RecordedRun) -> None:
    fields = {"stage": "denoise", "label": "seed 7", "error": "StageFailed", "message": "NaN"}
    run.journal.write("failure", **fields)
    report = run_report(run.folder)
    (failure,) = report.failures
    assert report.state == "failed"
    assert (failure.what, failure.stage) == ("seed 7", "denoise")
    assert (failure.kind, failure.reason) == ("StageFailed", "NaN")


def test_a_run_is_finished_when_every_request_of_every_phase_is(run: RecordedRun) -> None:
    phase(run, "decode", num_requests=2)
    run.request("decode", "a", cached=False)
    run.picture("a.png", "a fox", digest="a")
    assert run_report(run.folder).state == "unfinished"
    run.request("decode", "b", cached=False)
    assert run_report(run.folder).state == "finished"


def test_what_a_killed_run_has_left_is_read(run: RecordedRun) -> None:
    run.picture("a.png", "a fox")
    with (run.folder / "journal.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"event": "item", "path": "/cut/o')
    (run.folder / "00009-denoise.json").write_text('{"stage": "deno')
    report = run_report(run.folder)
    assert [item.name for item in report.items] == ["a.png"]
    assert report.state == "unfinished" and not report.totals


def test_a_journal_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    journal = Journal(tmp_path / "file" / "run", {}, told.append)
    journal.write("saved", path="/a")
    journal.write("saved", path="/b")
    (sentence,) = told
    assert "journal is not kept" in sentence and str(tmp_path / "file" / "run") in sentence


def test_a_second_attempt_goes_on_in_the_same_journal(run: RecordedRun) -> None:
    run.picture("a.png", "a fox")
    again = Journal(run.folder, {"family": "flux"}, print)
    again.write("warning", message="once more")
    events = [line["event"] for line in read_journal(run.folder)]
    assert events == ["run", "item", "saved", "run", "warning"]
    assert run_report(run.folder).facts["family"] == "flux"


# ---- finding a run -------------------------------------------------------------------------


def test_a_run_is_found_by_the_start_of_its_id_and_as_the_last(tmp_path: Path) -> None:
    for n, run_id in enumerate(("aaaa-1", "aabb-2", "cccc-3")):
        RecordedRun(tmp_path, run_id).journal.write("warning", message="")
        os.utime(tmp_path / "reports" / run_id / "journal.jsonl", (n, n))
    os.utime(tmp_path / "reports" / "aabb-2" / "journal.jsonl", (9, 9))
    reports = tmp_path / "reports"
    assert find_run(reports, "last").name == "aabb-2"
    assert find_run(reports, "CC").name == "cccc-3"
    assert find_run(reports, "aaaa-1").name == "aaaa-1"
    with pytest.raises(RequestError, match=r"2 runs begin with 'aa': .*give more"):
        find_run(reports, "aa")
    with pytest.raises(RequestError, match=r"no run begins with '\.\./x' in .*the newest"):
        find_run(reports, "../x")
    with pytest.raises(RequestError, match="no run begins with ''"):
        find_run(reports, "")
    with pytest.raises(RequestError, match="no run has left a report"):
        find_run(tmp_path / "absent", "last")


# ---- the command ---------------------------------------------------------------------------


def test_the_command_writes_the_page_beside_the_pictures(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(home)
    run.picture("a.png", "a fox")
    assert cli.main(["report", "0bad"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == run.pictures / "report-0badcafe.html"
    assert '"./a.png"' in path.read_text(encoding="utf-8")
    assert cli.main(["report", "last", "--json", "--output", str(home / "elsewhere.html")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(home / "elsewhere.html") and told["state"] == "unfinished"
    assert '"./pictures/a.png"' in (home / "elsewhere.html").read_text(encoding="utf-8")


def test_an_unknown_run_is_a_clear_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RecordedRun(home).picture("a.png", "a fox")
    assert cli.main(["report", "ffff"]) == 2
    assert "no run begins with 'ffff'" in capsys.readouterr().err

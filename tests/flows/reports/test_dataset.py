"""A dataset of runs is read by pyarrow, DuckDB and pandas, and holds each run once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from flows import cli
from flows.reports.dataset import Exported, export
from stages.errors import RequestError
from tests.support.report_runs import BEGAN, RecordedRun, stage_report

HUGE = 2**64 - 1


def recorded(root: Path, run_id: str = "0badcafe-1", **header: Any) -> RecordedRun:
    """A run of two requests, one of them found, and one picture."""
    run = RecordedRun(root, run_id, **header)
    run.report(stage_report("denoise", fallbacks=["decoded in tiles"]))
    run.request("denoise", "a", cached=False)
    run.request("encode", "b", cached=True, elapsed_s=0.5)
    run.picture("a.png", "a fox, \u201cred\u201d 🦊", seed=HUGE, digest="a")
    return run


def rows(dataset: Path, table: str) -> list[dict[str, Any]]:
    found = ds.dataset(dataset / table, partitioning="hive").to_table().to_pylist()
    return sorted(found, key=lambda row: (row["run_id"], str(row.get("stage"))))


def written(num: int = 1, **more: int) -> Exported:
    counts = dict.fromkeys(("num_unchanged", "num_empty", "num_unread"), 0)
    return Exported(num_written=num, **counts | more)


def test_three_readers_find_the_same_without_our_code(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    dataset = tmp_path / "data"
    assert export([run.folder], dataset) == written()

    made, found = rows(dataset, "requests")
    assert (made["stage"], made["cached"], made["family"]) == ("denoise", False, "z-image")
    assert made["began_at"].timestamp() == BEGAN and made["date"] == found["date"]
    assert dict(made["host_phases_s"]) == {"load": 1.0, "run": 2.5, "other": 0.5}
    assert made["peak_rss_bytes"] == 900 and made["fallbacks"] == ["decoded in tiles"]
    assert json.loads(made["report"])["memory_samples"]["anonymous_bytes"] == [100, 700, 300]
    assert (found["cached"], found["elapsed_s"], found["report"]) == (True, 0.5, None)

    by_duckdb = duckdb_rows(
        f"SELECT f.seed, f.prompt, r.stage, r.elapsed_s, r.family FROM "
        f"read_parquet('{dataset}/files/**/*.parquet', hive_partitioning=true) f JOIN "
        f"read_parquet('{dataset}/requests/**/*.parquet', hive_partitioning=true) r "
        "USING (run_id) WHERE NOT r.cached"
    )
    assert by_duckdb == [(HUGE, "a fox, \u201cred\u201d 🦊", "denoise", 4.0, "z-image")]

    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(dataset / "files")
    assert int(frame["seed"].iloc[0]) == HUGE and str(frame["seed"].dtype) == "uint64"
    assert list(frame["family"]) == ["z-image"] and not frame["cached"].iloc[0]


def duckdb_rows(query: str) -> Sequence[tuple[Any, ...]]:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        found: Sequence[tuple[Any, ...]] = connection.execute(query).fetchall()
        return found


def test_runs_are_added_once_and_replaced_when_they_have_grown(tmp_path: Path) -> None:
    first, dataset = recorded(tmp_path), tmp_path / "data"
    second = recorded(tmp_path, "1badcafe-2", family="flux")
    assert export([first.folder], dataset) == written()
    assert export([first.folder, second.folder], dataset) == written(num_unchanged=1)
    assert [row["family"] for row in rows(dataset, "files")] == ["z-image", "flux"]
    first.picture("b.png", "a crow", digest="b")
    first.report(stage_report("decode"))
    assert export([first.folder, second.folder], dataset) == written(num_unchanged=1)
    assert len(rows(dataset, "files")) == 3 and len(rows(dataset, "requests")) == 5
    assert (
        len(list(dataset.rglob("*"))) == len([*dataset.rglob("*=*"), *dataset.rglob("*.par*")]) + 2
    )


def test_a_run_that_was_half_written_is_written_again(tmp_path: Path) -> None:
    run, dataset = recorded(tmp_path), tmp_path / "data"
    export([run.folder], dataset)
    (path,) = (dataset / "requests").rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:100])
    assert export([run.folder], dataset) == written()
    assert len(rows(dataset, "requests")) == 2


def test_what_cannot_be_read_costs_its_run_alone(tmp_path: Path) -> None:
    good, dataset = recorded(tmp_path), tmp_path / "data"
    strange = RecordedRun(tmp_path, "strange")
    strange.journal.write("request", stage="encode", cached=True)  # of another version
    empty = tmp_path / "reports" / "empty"
    empty.mkdir()
    folders = [empty, good.folder, strange.folder]
    assert export(folders, dataset) == written(num_empty=1, num_unread=1)
    assert {row["run_id"] for row in rows(dataset, "requests")} == {"0badcafe-1"}


def test_a_run_without_a_journal_is_there_by_its_reports(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, "lost", family="a/../b")
    run.report(stage_report("encode"))
    assert export([run.folder], tmp_path / "data") == written()
    (row,) = rows(tmp_path / "data", "requests")
    assert (row["family"], row["date"], row["model"]) == ("unknown", "2026-09-21", None)


def test_a_familys_name_never_leaves_the_dataset(tmp_path: Path) -> None:
    run = recorded(tmp_path, family="../../x")
    export([run.folder], tmp_path / "data")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "pictures", "reports"}
    assert rows(tmp_path / "data", "files")[0]["family"] == "../../x"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"the dataset cannot be written: .*file.*--dataset"):
        export([recorded(tmp_path).folder], tmp_path / "file")


# ---- the command ---------------------------------------------------------------------------


def test_the_command_takes_one_run_or_all(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(home)
    recorded(home, "1badcafe-2")
    dataset = tmp_path / "data"
    assert cli.main(["report", "1bad", "--dataset", str(dataset)]) == 0
    assert capsys.readouterr().out == f"1 runs written to {dataset}\n"
    assert cli.main(["report", "all", "--dataset", str(dataset), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_written"], told["num_unchanged"]) == (1, 1)
    assert cli.main(["report", "all"]) == 2
    assert "put all into a --dataset" in capsys.readouterr().err


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "StageReport"
    with pytest.raises(SystemExit):
        cli.main(["report"])
    assert "RUN is missing" in capsys.readouterr().err

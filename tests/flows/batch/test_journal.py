"""A batch's journal: what is finished, whatever happened to the batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.batch.journal import NAME, Journal
from flows.batch.results import RowResult, read, write
from flows.batch.rows import PreparedRow
from stages.errors import ArtifactError, RequestError
from stages.file_writes import temp_name


def row(number: int = 1, digest: str = "a", **others: Any) -> PreparedRow:
    values: dict[str, Any] = {
        "number": number,
        "id": f"{number:06d}",
        "arguments": {},
        "own": {},
        "file_name": f"{number:06d}.png",
        "seed": 1,
        "digest": digest,
    }
    return PreparedRow(**values | others)


def result(row: PreparedRow, status: str = "done", **others: Any) -> RowResult:
    values: dict[str, Any] = {"id": row.id, "row": row.number, "status": status}
    if status == "done":
        values |= {"file": row.file_name, "file_bytes": 3}
    else:
        values |= {"error": "it would not", "error_type": "StageFailed"}
    return RowResult(**values | others)


def finish(journal: Journal, row: PreparedRow, status: str = "done") -> None:
    if status == "done":
        (journal.output / row.file_name).write_bytes(b"png")
    journal.add(result(row, status), row)


def test_a_finished_row_is_done_at_the_next_start(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        assert not journal.done(row())
        finish(journal, row())
        key = journal.key
    with Journal.open(tmp_path) as again:
        assert again.done(row())
        assert again.key == key  # seeds that were made of it stay


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "000001.png").unlink(),
        lambda folder: (folder / "000001.png").write_bytes(b"half"),
    ],
)
def test_a_row_whose_file_is_gone_or_changed_is_not_done(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row())
    change(tmp_path)
    with Journal.open(tmp_path) as again:
        assert not again.done(row())


def test_a_row_of_other_arguments_or_another_name_is_not_done(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row())
        assert not journal.done(row(digest="b"))
        assert not journal.done(row(file_name="other.png"))


def test_a_failed_row_is_run_again_on_demand_alone_and_once(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row(), "failed")
    with Journal.open(tmp_path) as again:
        assert again.done(row())
    with Journal.open(tmp_path, retry=["failed"]) as retried:
        assert not retried.done(row())
        finish(retried, row(), "failed")
        assert retried.done(row())


@pytest.mark.parametrize("num_cut", [1, 20])
def test_a_line_that_was_cut_off_costs_its_row_alone(tmp_path: Path, num_cut: int) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row(1))
        finish(journal, row(2))
    os.truncate(tmp_path / NAME, (tmp_path / NAME).stat().st_size - num_cut)
    with Journal.open(tmp_path) as again:
        assert again.done(row(1))
        assert not again.done(row(2))
        finish(again, row(2))
    with Journal.open(tmp_path) as last:
        assert last.done(row(1)) and last.done(row(2))
        assert not last.warnings


def test_a_damaged_line_costs_its_row_alone_and_is_told(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row(1))
        finish(journal, row(2))
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
    (tmp_path / NAME).write_bytes(b"".join(lines))
    with Journal.open(tmp_path) as again:
        assert not again.done(row(1))
        assert again.done(row(2))
        assert "1 lines" in again.warnings[0]
        assert [each.id for each in again.results()] == ["000002"]


def test_a_journal_that_was_cut_within_its_head_begins_anew(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event": "ba')
    with Journal.open(tmp_path) as journal:
        finish(journal, row())
    with Journal.open(tmp_path) as again:
        assert again.done(row())


@pytest.mark.parametrize(
    "found", [b"id,prompt\n1,a\n", b'{"event": "batch", "schema": "other/9", "key": "k"}\n']
)
def test_another_file_of_that_name_is_left_alone(tmp_path: Path, found: bytes) -> None:
    (tmp_path / NAME).write_bytes(found)
    with pytest.raises(RequestError, match="no journal of a batch"):
        Journal.open(tmp_path)
    assert (tmp_path / NAME).read_bytes() == found


def test_one_batch_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    with Journal.open(tmp_path), pytest.raises(RequestError, match="another batch is at work"):
        Journal.open(tmp_path)
    Journal.open(tmp_path).close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with Journal.open(tmp_path) as journal:
        finish(journal, row(1))
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        with pytest.raises(ArtifactError, match="no space"):
            finish(journal, row(2))
        monkeypatch.undo()
        finish(journal, row(3))
    with Journal.open(tmp_path) as again:
        assert not again.warnings
        assert [again.done(row(number)) for number in (1, 2, 3)] == [True, False, True]


def test_a_file_that_appeared_just_before_a_kill_is_the_batchs_own(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.saving(row(), "f" * 64)
    with Journal.open(tmp_path) as again:
        assert again.is_own(row())
        assert not again.is_own(row(digest="b"))
        assert not again.done(row())


def test_a_bad_row_is_told_once_however_often_the_batch_starts(tmp_path: Path) -> None:
    bad = result(row(), "invalid", error="no such size")
    with Journal.open(tmp_path) as journal:
        journal.add(bad)
    size = (tmp_path / NAME).stat().st_size
    with Journal.open(tmp_path) as again:
        again.add(result(row(), "invalid", error="no such size"))
        assert (tmp_path / NAME).stat().st_size == size
        again.add(result(row(), "invalid", error="another reason"))
        assert [each.error for each in again.results()] == ["another reason"]


def test_results_are_the_tables_rows_in_its_order_with_exact_types(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        finish(journal, row(7))  # of an earlier table
    with Journal.open(tmp_path) as journal:
        exact = result(
            row(2),
            seed=2**64 - 1,
            guidance_scale=None,
            digests={"decode.image-0": "d" * 64},
            seconds={"denoise": 1.5},
            warnings=("a", "b"),
        )
        journal.add(exact, row(2))
        journal.add(result(row(1), "failed", phase="denoise"), row(1))
        path = write(tmp_path, journal.results(), {"family": "z-image"})
        assert journal.counts() == {"done": 1, "failed": 1, "invalid": 0}
    found = read(path)
    assert [each.row for each in found] == [1, 2]
    assert found[1] == exact
    assert found[0].error == "it would not"


def test_results_of_no_row_are_a_table_with_all_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = write(tmp_path, [], {})
    assert pq.read_schema(path).names == list(RowResult.__dataclass_fields__)
    assert read(path) == []
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_what_a_killed_batch_was_writing_goes_at_the_next_start(tmp_path: Path) -> None:
    host = temp_name("x").removeprefix("x.tmp-").rpartition("-")[0].rpartition("-")[0]
    (tmp_path / "sub").mkdir()
    dead = tmp_path / "sub" / f".picture.tmp-{host}-{2**22 + 1}-01234567"  # over any pid
    living = tmp_path / f".results.parquet.tmp-{host}-{os.getpid()}-01234567"
    other_host = tmp_path / f".picture.tmp-elsewhere-{2**22 + 1}-01234567"
    for path in (dead, living, other_host):
        path.write_bytes(b"half")
    Journal.open(tmp_path).close()
    assert [path.exists() for path in (dead, living, other_host)] == [False, True, True]

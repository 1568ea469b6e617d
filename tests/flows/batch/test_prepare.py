"""Rows are checked, named and seeded before any of them runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.batch.errors import TableError
from flows.batch.families import BatchFamily, batch_family
from flows.batch.journal import Journal
from flows.batch.prepare import Prepared, read
from flows.batch.results import RowResult
from flows.batch.rows import PreparedRow
from stages.errors import ModelError, RequestError

Read = Callable[..., Prepared]


@pytest.fixture(scope="module")
def family() -> BatchFamily:
    return batch_family("z-image")


@pytest.fixture
def prepare(tmp_path: Path, home: Path, family: BatchFamily) -> Read:
    """Reads rows as a batch would at each start; the last one's journal is `journal`."""

    def prepared(rows: list[dict[str, Any]], defaults: Any = None, **options: Any) -> Prepared:
        table = tmp_path / "rows.jsonl"
        table.write_text("\n".join(json.dumps(row) for row in rows))
        with Journal.open(tmp_path / "out") as journal:
            found = read(table, family, defaults or {}, journal=journal, **options)
            found.good = list(found.rows())  # type: ignore[attr-defined]
        return found

    return prepared


def good(prepared: Prepared) -> list[PreparedRow]:
    return prepared.good  # type: ignore[attr-defined, no-any-return]


def finish(folder: Path, rows: list[PreparedRow]) -> None:
    """Do as a batch that runs these rows."""
    with Journal.open(folder / "out") as journal:
        for row in rows:
            (folder / "out" / row.file_name).write_bytes(b"png")
            made = RowResult(
                id=row.id, row=row.number, status="done", file=row.file_name, file_bytes=3
            )
            journal.add(made, row)


def test_bad_rows_have_a_reason_and_the_others_run(prepare: Read) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"row {n}"} for n in range(1, 11)]
    rows[3]["height"] = 777
    rows[5]["image"] = "missing.png"
    rows[7]["prompt"] = None
    rows[8]["seed"] = 1.5
    found = prepare(rows)
    assert found.count == 10
    assert [each.row for each in found.bad] == [4, 6, 8, 9]
    assert [row.number for row in good(found)] == [1, 2, 3, 5, 7, 10]
    reasons = [each.error or "" for each in found.bad]
    assert "rows.jsonl row 4: height 777 is not" in reasons[0]
    assert "missing.png" in reasons[1]
    assert "prompt is empty" in reasons[2]
    assert "seed" in reasons[3]
    assert all(each.status == "invalid" for each in found.bad)


def test_a_row_has_its_own_arguments_and_the_batchs_for_what_it_leaves_empty(
    prepare: Read, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "num_inference_steps": None}, {"prompt": "b", "num_inference_steps": 3}]
    first, second = good(prepare(rows, {"num_inference_steps": 2, "guidance_scale": 4.0}))
    assert first.arguments["num_inference_steps"] == 2
    assert second.arguments["num_inference_steps"] == 3
    assert first.arguments["output"] == str(tmp_path / "out")
    assert first.own == {
        "prompt": "a",
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "seed": first.seed,
    }


def test_seeds_that_no_row_gives_differ_and_stay_when_the_batch_starts_again(
    prepare: Read, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 2**64 - 1}, {"prompt": "a"}]
    rows[3]["seed"] = "-1"
    seeds = [row.seed for row in good(prepare(rows))]
    assert len(set(seeds)) == 4
    assert seeds[2] == 2**64 - 1
    assert [row.seed for row in good(prepare(rows))] == seeds
    assert [row.seed for row in good(prepare(rows, {"seed": 5}))] == [5, 5, 2**64 - 1, seeds[3]]


def test_what_is_finished_is_passed_over(prepare: Read, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in "abc"]
    finish(tmp_path, good(prepare(rows))[:2])
    found = prepare(rows)
    assert (found.num_done, found.num_open) == (2, 1)
    assert [row.number for row in good(found)] == [3]
    assert [[row.number for row in chunk] for chunk in found.chunks(2)] == [[3]]


def test_a_row_runs_again_when_what_makes_its_picture_changes(
    prepare: Read, tmp_path: Path
) -> None:
    from PIL import Image

    picture = tmp_path / "start.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    rows = [{"prompt": "a", "image": str(picture), "seed": 1}, {"prompt": "b", "seed": 1}]
    before = good(prepare(rows))
    same = good(prepare(rows, {"device": "cpu", "on_truncate": "error"}))
    assert [row.digest for row in same] == [row.digest for row in before]
    Image.new("RGB", (64, 64), "blue").save(picture)
    after = good(prepare(rows))
    assert after[0].digest != before[0].digest
    assert after[1].digest == before[1].digest
    other = good(prepare(rows, {"embed_settings": False}))
    assert other[1].digest != before[1].digest


def test_names_are_made_of_the_template_and_a_row_may_have_its_own(prepare: Read) -> None:
    rows = [
        {"id": 7, "prompt": "A red/Circle"},
        {"id": "x", "prompt": "b", "name": "sub/mine"},
    ]
    found = good(prepare(rows, template="{row:03d}-{prompt}-{height}"))
    assert [row.file_name for row in found] == ["001-a-red-circle-128.png", "sub/mine.png"]
    assert [row.file_name for row in good(prepare(rows))] == ["7.png", "sub/mine.png"]


@pytest.mark.parametrize(
    "names",
    [
        ("Cat", "cat"),
        ("stra\u00dfe", "STRASSE"),
        ("\u00e9", "e\u0301"),
        ("a.png/b", "A"),
        ("A", "a.png/b"),
    ],
)
def test_names_that_some_disk_takes_for_one_are_found_before_anything_runs(
    prepare: Read, names: tuple[str, str]
) -> None:
    rows = [{"prompt": "p", "id": f"r{n}", "name": name} for n, name in enumerate(names)]
    with pytest.raises(TableError, match=r"would be written twice.*r1.*r0"):
        prepare(rows)


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/x", "..\\..\\x", "a/../../x", "~", "C:\\x", "\\\\host\\share", "x\0.png",
     ".", "-rf", "....//", "\u202egnp", "a ", "x" * 252],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_folder_or_is_none_makes_a_bad_row(
    prepare: Read, tmp_path: Path, name: str
) -> None:
    before = sorted(tmp_path.iterdir())
    found = prepare([{"prompt": "a", "name": name}, {"prompt": "b", "name": "a%2f..%2fx"}])
    assert [each.row for each in found.bad] == [1]
    assert "file name" in (found.bad[0].error or "")
    assert [row.file_name for row in good(found)] == ["a%2f..%2fx.png"]  # never decoded
    assert {each.name for each in tmp_path.iterdir()} - {each.name for each in before} <= {
        "rows.jsonl", "out", "exeunt-home"
    }  # fmt: skip


def test_an_id_that_stands_twice_refuses_the_batch(prepare: Read) -> None:
    with pytest.raises(TableError, match=r"id 'a' stands in row 1 and in row 3"):
        prepare([{"id": id_, "prompt": "p"} for id_ in ("a", "b", "a")])


def test_an_unknown_column_refuses_the_batch_by_its_name(prepare: Read) -> None:
    with pytest.raises(RequestError, match=r"'promt' \(did you mean prompt\?\)"):
        prepare([{"prompt": "a"}, {"prompt": "a", "promt": "b"}])


def test_a_wrong_argument_for_all_rows_is_the_batchs_error_not_that_of_each_row(
    prepare: Read,
) -> None:
    with pytest.raises(TableError, match="dtype is 'fp61'"):
        prepare([{"prompt": "a"}], {"dtype": "fp61"})
    with pytest.raises(ModelError, match="missing"):
        prepare([{"prompt": "a"}], {"model": "/no/such/model"})


def test_a_file_that_the_batch_has_not_made_is_replaced_on_demand_alone(
    prepare: Read, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "name": "mine"}]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.png").write_bytes(b"precious")
    with pytest.raises(TableError, match=r"mine\.png of row '000001'.*--overwrite"):
        prepare(rows)
    assert len(good(prepare(rows, overwrite=True))) == 1


def test_a_picture_of_a_row_that_has_changed_is_replaced_on_demand_alone(
    prepare: Read, tmp_path: Path
) -> None:
    finish(tmp_path, good(prepare([{"prompt": "a"}])))
    with pytest.raises(TableError, match="would be replaced"):
        prepare([{"prompt": "another"}])
    assert prepare([{"prompt": "another"}], overwrite=True).num_open == 1


def test_forty_rows_of_one_kind_are_one_kind_of_work(prepare: Read) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(n)} for n in range(40)]
    rows += [{"prompt": "a", "guidance_scale": 3.0, "num_inference_steps": 5}]
    jobs = prepare(rows).jobs
    assert sorted(jobs.values()) == [1, 40]
    assert {(work.num_inference_steps, work.is_guided) for work in jobs} >= {(5, True)}

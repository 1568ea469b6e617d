"""Tables of each form give the same exact rows, and say where what is wrong stands."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.table import Table, TableRow
from flows.table_columns import Columns, row_id
from flows.z_image import z_image
from stages.errors import RequestError

SEEDS = [1582218195625938945, None, 4873214862074861312, 2**64 - 1]


def write_parquet(path: Path, seeds: list[int | None]) -> Path:
    table = pa.table({"prompt": ["a"] * len(seeds), "seed": pa.array(seeds, pa.uint64())})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
    return path.with_suffix(".parquet")


def write_csv(path: Path, seeds: list[int | None]) -> Path:
    lines = ["prompt,seed", *(f"a,{'' if seed is None else seed}" for seed in seeds)]
    path.with_suffix(".csv").write_text("\n".join(lines))
    return path.with_suffix(".csv")


def write_json_lines(path: Path, seeds: list[int | None]) -> Path:
    lines = [json.dumps({"prompt": "a", "seed": seed}) for seed in seeds]
    path.with_suffix(".jsonl").write_text("\n\n".join(lines))
    return path.with_suffix(".jsonl")


FORMS = [write_parquet, write_csv, write_json_lines]


@pytest.fixture
def columns() -> Columns:
    return Columns(z_image.fn, "z-image")


def row(**cells: Any) -> TableRow:
    return TableRow(number=3, place="t.csv row 3", cells={"prompt": "a", **cells})


def read_bytes(folder: Path, name: str, data: bytes) -> list[TableRow]:
    (folder / name).write_bytes(data)
    return list(Table(folder / name).rows())


@pytest.mark.parametrize("write", FORMS)
def test_a_null_changes_no_seed(
    tmp_path: Path, columns: Columns, write: Callable[[Path, list[int | None]], Path]
) -> None:
    rows = list(Table(write(tmp_path / "t", SEEDS)).rows())
    read = [columns.read(each, {"seed": 5})["seed"] for each in rows]
    assert [int(seed) for seed in read] == [5 if seed is None else seed for seed in SEEDS]
    assert not any(isinstance(seed, float) for seed in read)


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        (pa.int64(), [7, None]),
        (pa.decimal128(20, 0), [Decimal(2**64 - 1), None]),
        (pa.string(), [str(2**64 - 1), None]),
    ],
)
def test_seeds_come_exact_from_every_whole_type(
    tmp_path: Path, columns: Columns, kind: pa.DataType, seeds: list[Any]
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "seed": pa.array(seeds, kind)}), path)
    first, second = (columns.read(each, {"seed": -1})["seed"] for each in Table(path).rows())
    assert (int(first), second) == (int(seeds[0]), -1)


def test_a_float_column_of_seeds_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "seed": [7.0]}), tmp_path / "t.parquet")
    with pytest.raises(RequestError, match=r"column 'seed' of .* is double"):
        list(Table(tmp_path / "t.parquet").rows())


def test_empty_and_null_words_stay_what_they_are(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path, "t.csv", b'prompt,id\n"",1\n,2\nnan,3\nnull,4\n"a\nb",5\n')
    assert [each.cells["prompt"] for each in rows] == ["", None, "nan", "null", "a\nb"]


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + "id,prompt\n1,ü\n".encode(),
        codecs.BOM_UTF8 + '"id",prompt\n1,ü\n'.encode(),
        "id,prompt\n1,ü\n".encode("utf-16"),
        "id,prompt\r\n1,ü\r\n".encode(),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path, data: bytes) -> None:
    assert [each.cells for each in read_bytes(tmp_path, "t.csv", data)] == [
        {"id": "1", "prompt": "ü"}
    ]


def test_bytes_that_are_no_utf8_are_told_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 3 of .* is not UTF-8: byte 0xfc at 2"):
        read_bytes(tmp_path, "t.csv", "id,prompt\n1,a\n2,ü\n".encode("latin-1"))


def test_a_line_with_too_many_cells_is_one_bad_row(tmp_path: Path) -> None:
    rows = read_bytes(tmp_path, "t.csv", b"id,prompt\n1,a\n2,b,c\n3,d\n4\n")
    assert [(each.number, each.problem) for each in rows] == [
        (1, ""),
        (2, "line has 3 cells, the header has 2"),
        (3, ""),
        (4, "line has 1 cells, the header has 2"),
    ]


def test_a_bad_line_of_json_is_one_bad_row_with_its_line(tmp_path: Path) -> None:
    lines = [b'\xef\xbb\xbf{"seed": 18446744073709551616}', b"", b'{"a": 1, "a": 2}']
    lines += [b'{"a": NaN}', b'{"a": 1,}', b"[1]", b'{"a": "\xff"}', b'{"prompt": "last"}']
    rows = read_bytes(tmp_path, "t.jsonl", b"\n".join(lines))
    assert rows[0].cells == {"seed": 2**64}
    told = [each.problem for each in rows[1:-1]]
    wanted = [
        *("line 3 .*key 'a' stands twice", "line 4 .*NaN is no JSON number", "line 5 "),
        *("line 6 holds a list", "line 7 is not UTF-8: byte 0xff at 7"),
    ]
    for problem, pattern in zip(told, wanted, strict=True):
        with pytest.raises(RequestError, match=pattern):
            raise RequestError(problem)
    assert (rows[-1].problem, rows[-1].cells) == ("", {"prompt": "last"})


def test_a_folder_is_one_table_in_the_order_of_its_names(tmp_path: Path) -> None:
    write_csv(tmp_path / "b", [3])
    write_parquet(tmp_path / "a", [1, 2])
    write_json_lines(tmp_path / "c", [4])
    (tmp_path / ".hidden.csv").write_text("x\n1\n")
    (tmp_path / "notes.txt").write_text("not a table")
    rows = list(Table(tmp_path).rows())
    assert [(each.number, int(each.cells["seed"])) for each in rows] == [
        *((1, 1), (2, 2), (3, 3), (4, 4))
    ]
    assert rows[2].place == "b.csv row 1"


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").touch()
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "t.csv").touch()
    (tmp_path / "empty").mkdir()
    for name, message in [
        *(("nowhere.csv", "does not exist"), ("t.xlsx", "extension '.xlsx', known are")),
        *(("empty", "a folder without a table"), ("t.parquet", "cannot be read as parquet")),
        ("t.csv", "is empty"),
    ]:
        with pytest.raises(RequestError, match=message):
            list(Table(tmp_path / name).rows())


def test_a_table_that_changes_between_two_readings_is_refused(tmp_path: Path) -> None:
    table = Table(write_csv(tmp_path / "t", [1]))
    list(table.rows())
    write_csv(tmp_path / "t", [1, 2])
    with pytest.raises(RequestError, match="has changed while it was being read"):
        list(table.rows())


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"promt": "a"}, r"unknown column 'promt' \(did you mean prompt\?\); z-image takes .*id"),
        ({"model": "m"}, r"unknown column 'model' \(one for the whole batch\)"),
        ({"num_images": 2}, r"unknown column 'num_images' \(one row is one picture\)"),
        ({"os.system": 1, "\x1b[31m": 2}, r"unknown columns 'os.system', '.*x1b"),
    ],
)
def test_an_unknown_column_is_named(columns: Columns, cells: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        columns.check_names(row(**cells))


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        ({"height": "512", "guidance_scale": "3.5"}, {"height": 512, "guidance_scale": 3.5}),
        ({"height": 512.0, "width": Decimal(64)}, {"height": 512, "width": 64}),
        ({"height": None}, {"height": 32}),
        ({"negative_prompt": ""}, {"negative_prompt": ""}),
    ],
)
def test_cells_become_arguments_of_their_type(
    columns: Columns, cells: dict[str, Any], values: dict[str, Any]
) -> None:
    columns.check_names(row(**cells))
    read = columns.read(row(**cells), {"height": 32})
    assert {name: read[name] for name in values} == values
    assert [type(read[name]) for name in values] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"height": "12.5"}, "height is the text '12.5', expected a whole number"),
        ({"height": "1e3"}, "height is the text"),
        ({"guidance_scale": "much"}, "guidance_scale is 'much' .*expected a number"),
        ({"guidance_scale": "inf"}, "guidance_scale is inf, expected a finite number"),
        ({"prompt": None}, "prompt is empty; fill the cell or give --prompt"),
        ({"prompt": ["a", "b"]}, "prompt is .*expected text"),
    ],
)
def test_a_cell_of_another_type_is_named(
    columns: Columns, cells: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        columns.read(row(**cells), {})


def test_a_row_without_an_id_is_called_by_its_number() -> None:
    assert [row_id(row()), row_id(row(id=7)), row_id(row(id="fox"))] == ["000003", "7", "fox"]
    for bad in (1.5, True, "", "x" * 201):
        with pytest.raises(RequestError, match="id "):
            row_id(row(id=bad))

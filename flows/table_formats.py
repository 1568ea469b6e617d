"""The forms that a batch table may have, each as an iterator over its rows.

Whatever a form's own reader would guess is taken from it: CSV cells come as text, and JSON is
read by a parser that keeps whole numbers of any size.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from stages.errors import RequestError
from stages.rules import escape_for_terminal

Cells = tuple[dict[str, Any], str]

BATCH_ROWS = 1_000
"""Rows of a parquet file that are turned into Python values at a time."""

MAX_LINE_CHARACTERS = 4 * 2**20


# ---- parquet -------------------------------------------------------------------------------


def read_parquet(path: Path) -> Iterator[Cells]:
    """Rows of a parquet file, row group by row group.

    Raises:
        RequestError: It is no parquet file, or its seeds are floats.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for column in file.schema_arrow:
                if column.name == "seed" and pa.types.is_floating(column.type):
                    raise RequestError(
                        f"column 'seed' of {path} is {column.type}, which cannot hold every seed "
                        "exactly; store it as int64, uint64, decimal or text (a null turns whole "
                        "numbers into floats in many tools)"
                    )
            require_columns_once(file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    yield row, ""
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"table {path} cannot be read as parquet: {error}") from error


def require_columns_once(names: list[str], path: Path) -> None:
    """Refuse a table two of whose columns share a name, or one of whose columns has none.

    Raises:
        RequestError: With the name.
    """
    for place, name in enumerate(names):
        if not name:
            raise RequestError(f"column {place + 1} of {path} has no name")
        if name in names[:place]:
            raise RequestError(f"column {shown(name)} stands twice in {path}")


def shown(name: str) -> str:
    """A column's name for messages."""
    return repr(escape_for_terminal(name, limit=60))


# ---- CSV -----------------------------------------------------------------------------------


def read_csv(path: Path) -> Iterator[Cells]:
    """Rows of a CSV file, every cell as text; an empty cell without quotes is None.

    Raises:
        RequestError: It is not UTF-8 or UTF-16, or cannot be parsed.
    """
    import pyarrow as pa
    import pyarrow.csv as arrow

    encoding, delimiter = _encoding(path), "\t" if path.suffix.lower() == ".tsv" else ","
    names = _csv_header(path, encoding, delimiter)
    bad: list[tuple[int, str]] = []  # the reader's row number, and what is wrong

    def keep_bad(row: Any) -> str:
        found, expected = row.actual_columns, row.expected_columns
        bad.append((row.number, f"line has {found} cells, the header has {expected}"))
        return "skip"

    options = {
        "read_options": arrow.ReadOptions(
            use_threads=False, encoding="utf-16" if encoding == "utf-16" else "utf8"
        ),
        "parse_options": arrow.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=keep_bad
        ),
        "convert_options": arrow.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    }
    number, num_told = 1, 0  # the header is the reader's row 1
    try:
        with arrow.open_csv(path, **options) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    while num_told < len(bad) and bad[num_told][0] <= number:
                        yield {}, bad[num_told][1]
                        num_told, number = num_told + 1, number + 1
                    yield row, ""
    except pa.ArrowInvalid as error:
        _raise_csv_error(path, encoding, error)
    except OSError as error:
        raise RequestError(f"table {path} cannot be read: {error}") from error
    for _, reason in bad[num_told:]:
        yield {}, reason


def _encoding(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise RequestError(f"table {path} cannot be read: {error.strerror}") from error
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"


def _csv_header(path: Path, encoding: str, delimiter: str) -> list[str]:
    try:
        with path.open(encoding=encoding, newline="") as file:
            names = next(csv.reader(file, delimiter=delimiter), [])
    except (UnicodeError, csv.Error) as error:
        _raise_csv_error(path, encoding, error)
    if not names:
        raise RequestError(f"table {path} is empty; its first line has to name the columns")
    require_columns_once(names, path)
    return names


def _raise_csv_error(path: Path, encoding: str, error: Exception) -> NoReturn:
    """Tell of a file that cannot be read, with the line where its bytes are not its encoding's."""
    if encoding != "utf-16":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as wrong:
                    raise RequestError(
                        f"line {number} of {path} is not UTF-8: byte 0x{line[wrong.start]:02x} "
                        f"at {wrong.start}; save the table as UTF-8"
                    ) from error
    raise RequestError(f"table {path} cannot be read as CSV: {error}") from error


# ---- JSON lines ----------------------------------------------------------------------------


def read_json_lines(path: Path) -> Iterator[Cells]:
    """Rows of a file with one JSON object a line; empty lines are passed over.

    Raises:
        RequestError: The file cannot be read, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield _json_row(line, number)
    except OSError as error:
        raise RequestError(f"table {path} cannot be read: {error.strerror}") from error


def _json_row(line: bytes, number: int) -> Cells:
    try:
        if len(line) > MAX_LINE_CHARACTERS:
            raise ValueError(f"it has {len(line)} bytes, allowed are {MAX_LINE_CHARACTERS}")
        row = json.loads(line.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return {}, f"line {number} is not UTF-8: byte 0x{line[error.start]:02x} at {error.start}"
    except RecursionError:
        return {}, f"line {number} is nested too deeply"
    except ValueError as error:
        return {}, f"line {number} cannot be used as JSON: {error}"
    if not isinstance(row, dict):
        return {}, f"line {number} holds a {type(row).__name__}, expected a JSON object"
    return row, ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {shown(name)} stands twice")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")

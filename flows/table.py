"""Rows of a batch table, streamed from parquet, CSV, JSON lines or a folder of them.

Cells come as exact Python values: a null never turns a column of whole numbers into floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.table_formats import read_csv, read_json_lines, read_parquet
from stages.errors import RequestError

Cells = tuple[dict[str, Any], str]
"""A row's values by column, and why they cannot be used; the reason is empty if they can."""

READERS: dict[str, Callable[[Path], Iterator[Cells]]] = {
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row as it stands in the table.

    Attributes:
        number: From 1, through all files of the table.
        place: File and row in it, for people.
        cells: Values by column; None where a cell is empty.
        problem: Why the row itself cannot be read; empty if it can.
    """

    number: int
    place: str
    cells: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Table:
    """A table that can be read again and again, each time from the start.

    Args:
        path: A file of a known form, or a folder of such files.

    Raises:
        RequestError: There is no such file, its form is unknown, or the folder holds none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.files = _files(self.path)
        self._states = [_state(file) for file in self.files]

    def rows(self) -> Iterator[TableRow]:
        """Every row in order; one block of a file is in memory at a time.

        Raises:
            RequestError: A file cannot be read, or has changed since the table was opened.
        """
        number = 0
        for file, state in zip(self.files, self._states, strict=True):
            if _state(file) != state:
                raise RequestError(
                    f"table {file} has changed while it was being read; start the batch again"
                )
            for number_in_file, (cells, problem) in enumerate(
                READERS[file.suffix.lower()](file), 1
            ):
                number += 1
                yield TableRow(
                    number=number,
                    place=f"{file.name} row {number_in_file}",
                    cells=cells,
                    problem=problem,
                )


def _files(path: Path) -> list[Path]:
    forms = ", ".join(READERS)
    if path.is_dir():
        found = sorted(
            file
            for file in path.iterdir()
            if file.suffix.lower() in READERS and not file.name.startswith((".", "_"))
        )
        if not found:
            raise RequestError(f"table {path} is a folder without a table; put files of {forms} in")
        return found
    if not path.exists():
        raise RequestError(f"table {path} does not exist")
    if path.suffix.lower() not in READERS:
        raise RequestError(
            f"table {path} has the extension {path.suffix or 'none'!r}, known are {forms}"
        )
    return [path]


def _state(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise RequestError(f"table {file} cannot be read: {error.strerror}") from error
    return (found.st_size, found.st_mtime_ns, found.st_ino)

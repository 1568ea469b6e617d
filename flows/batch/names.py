"""The file names of a batch: found to be in each other's or another file's way before it starts."""

from __future__ import annotations

from pathlib import Path

from flows.batch.errors import TableError
from flows.batch.rows import PreparedRow
from stages.file_names import name_key
from stages.text_rules import shown

MOST_NAMED = 5
"""Rows that one message names."""


class BatchNames:
    """The file names of a batch: each one file on every disk, and in the way of nothing."""

    def __init__(self, output: Path, overwrite: bool) -> None:
        self._output, self._overwrite = output, overwrite
        self._files: dict[str, str] = {}  # a name's key, and the row's id
        self._folders: dict[str, str] = {}
        self._collisions: list[str] = []
        self._in_the_way: list[str] = []

    def add(self, row: PreparedRow, *, is_own: bool) -> None:
        """Note the name of one row."""
        key = name_key(row.file_name)
        parts = key.split("/")
        folders = ["/".join(parts[: n + 1]) for n in range(len(parts) - 1)]
        other = self._files.setdefault(key, row.id)
        if other == row.id:
            other = self._folders.get(key, row.id)
        for folder in folders:
            self._folders.setdefault(folder, row.id)
            other = self._files.get(folder, other)
        if other != row.id:
            self._collisions.append(
                f"{shown(row.file_name)} of row {shown(row.id)} is in the way of row {shown(other)}"
            )
        elif not self._overwrite and not is_own and (self._output / row.file_name).exists():
            self._in_the_way.append(f"{row.file_name} of row {shown(row.id)}")

    def check(self) -> None:
        """Refuse names that some disk takes for one, and files that would be replaced.

        Raises:
            TableError: With the first of them.
        """
        if found := self._collisions:
            raise TableError(
                f"{_number(found, 'file name')} would be written twice on some disks, which take "
                f"upper and lower case for one: {_first(found)}; give names of their own, or a "
                "name template with {id} in it"
            )
        if found := self._in_the_way:
            raise TableError(
                f"{_number(found, 'file')} in {self._output} would be replaced, which this batch "
                f"has not made, or has made of other arguments: {_first(found)}; choose another "
                "output folder, or allow it with --overwrite"
            )


def _number(found: list[str], noun: str) -> str:
    return f"1 {noun}" if len(found) == 1 else f"{len(found)} {noun}s"


def _first(found: list[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more

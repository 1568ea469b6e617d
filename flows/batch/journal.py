"""What a batch has finished, row by row: `batch.jsonl` in its output folder.

Each line is appended in one piece as soon as its row is finished, so that a batch that is killed
at any instant knows at its next start what is done. The file is locked while a batch is open.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flows.batch.results import RowResult
from flows.batch.rows import PreparedRow
from stages.errors import ArtifactError, RequestError
from stages.file_writes import raise_write_error, temp_owner
from stages.media import check_output_folder

SCHEMA = "exeunt.batch/1"
NAME = "batch.jsonl"


@dataclass(slots=True)
class _Entry:
    """What the last lines of a row say, and where its result stands in the journal."""

    row: int
    status: str
    digest: str
    file: str | None
    file_bytes: int | None
    place: tuple[int, int]
    is_of_this_start: bool


class Journal:
    """The journal of one output folder, held by one batch at a time; see `open`.

    Attributes:
        key: Drawn once for the folder: seeds that no row gives are made of it.
        warnings: What was wrong with the journal that was found.
    """

    def __init__(self, output: Path, fd: int, retry: Collection[str]) -> None:
        self.output = output
        self.key = ""
        self.warnings: list[str] = []
        self._fd = fd
        self._size = 0
        self._retry = frozenset(retry)
        self._entries: dict[str, _Entry] = {}
        self._saving: dict[str, str] = {}  # row digest by id
        self._seen: set[str] = set()

    @classmethod
    def open(cls, output: str | Path, *, retry: Collection[str] = ()) -> Journal:
        """The journal of a folder, begun if there is none.

        Args:
            output: Created if need be.
            retry: Rows that an earlier start left in this status are run again: `failed`, `done`.

        Raises:
            RequestError: The folder cannot be written, another batch holds it, or what lies there
                is no journal.
            ArtifactError: The disk is full or fails.
        """
        folder = check_output_folder(output)
        path = folder / NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise_write_error(error, folder, 0)
        journal = cls(folder, fd, retry)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RequestError(
                    f"another batch is at work in {folder}; wait for its end, or choose another "
                    "output folder"
                ) from error
            journal._load(path)
            _remove_leftovers(folder)
        except BaseException:
            journal.close()
            raise
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Force the journal to the disk and let go of the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.fsync(fd)
            except OSError as error:
                raise_write_error(error, self.output, 0)
            finally:
                os.close(fd)

    # ---- questions -------------------------------------------------------------------------

    def done(self, row: PreparedRow) -> bool:
        """Whether nothing is left to do for a row: it is finished, and its file is still there.

        A row that failed counts, unless the journal was opened to retry it.
        """
        self._seen.add(row.id)
        entry = self._entries.get(row.id)
        if entry is None or entry.digest != row.digest:
            return False
        if entry.status in self._retry and not entry.is_of_this_start:
            return False
        if entry.status == "failed":
            return True
        if entry.status != "done" or entry.file != row.file_name:
            return False
        try:
            return (self.output / row.file_name).stat().st_size == entry.file_bytes
        except OSError:
            return False

    def is_own(self, row: PreparedRow) -> bool:
        """Whether the file of a row's name, if there is one, was made of this very row."""
        entry = self._entries.get(row.id)
        if entry is not None and entry.digest == row.digest and entry.file == row.file_name:
            return True
        return self._saving.get(row.id) == row.digest

    def results(self) -> Iterator[RowResult]:
        """The last result of each row of the table, in its order.

        Rows count of which this start has asked or told; so those that an earlier table had
        are left out.
        """
        entries = [entry for name, entry in self._entries.items() if name in self._seen]
        for entry in sorted(entries, key=lambda each: each.row):
            start, size = entry.place
            yield RowResult.from_json(json.loads(os.pread(self._fd, size, start))["result"])

    def counts(self) -> dict[str, int]:
        """How many rows of the table are in each status."""
        found = {"done": 0, "failed": 0, "invalid": 0}
        for name in self._seen & self._entries.keys():
            found[self._entries[name].status] += 1
        return found

    # ---- lines -----------------------------------------------------------------------------

    def saving(self, row: PreparedRow, sha256: str) -> None:
        """Note that the file of a row is about to appear, before it does.

        A batch that is killed between its file and its result finds it to be its own.

        Raises:
            ArtifactError: The disk is full or fails.
        """
        if self._saving.get(row.id) != row.digest:
            self._append("saving", {"id": row.id, "digest": row.digest, "sha256": sha256})
            self._saving[row.id] = row.digest

    def add(self, result: RowResult, row: PreparedRow | None = None) -> None:
        """Append what became of a row; a row that cannot run and did not before adds nothing.

        Args:
            row: The row; None for one that was refused, which has no digest.

        Raises:
            ArtifactError: The disk is full or fails; the journal stays as it was.
        """
        self._seen.add(result.id)
        digest = "" if row is None else row.digest
        entry = self._entries.get(result.id)
        document = result.to_json()
        if entry is not None and row is None and self._is_told(entry, document):
            return
        place = self._append("row", {"digest": digest, "result": document})
        self._keep(document, digest, place, is_of_this_start=True)

    def _is_told(self, entry: _Entry, document: dict[str, Any]) -> bool:
        told = json.loads(os.pread(self._fd, entry.place[1], entry.place[0]))["result"]
        names = ("row", "status", "error", "arguments")
        return all(told.get(name) == document[name] for name in names)

    def _append(self, event: str, fields: dict[str, Any]) -> tuple[int, int]:
        line = json.dumps({"event": event, **fields}, ensure_ascii=True).encode("ascii") + b"\n"
        if self._fd < 0:
            raise ArtifactError(f"the journal in {self.output} is closed")
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise_write_error(error, self.output, len(line))
        if written < len(line):  # a full disk takes a part; the next line must not join it
            os.ftruncate(self._fd, self._size)
            raise ArtifactError(
                f"no space: {written} of {len(line)} bytes of the journal were written in "
                f"{self.output}; free some space and start the batch again"
            )
        place = (self._size, len(line))
        self._size += len(line)
        return place

    # ---- opening ---------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        num_damaged = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # it was killed, or its disk full, in the middle
                    os.ftruncate(self._fd, self._size)
                    break
                try:
                    self._read(line, path)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    if isinstance(error, RequestError):
                        raise
                    num_damaged += 1
                self._size += len(line)
        if num_damaged:
            self.warnings.append(
                f"{num_damaged} lines of {path} cannot be read; their rows run again"
            )
        if not self.key:
            if self._size:
                raise RequestError(_foreign(path))
            self.key = secrets.token_hex(16)
            self._append("batch", {"schema": SCHEMA, "key": self.key})

    def _read(self, line: bytes, path: Path) -> None:
        document = json.loads(line)
        match document["event"]:
            case "batch":
                if document["schema"] != SCHEMA:
                    raise RequestError(_foreign(path))
                self.key = str(document["key"])
            case "saving":
                self._saving[str(document["id"])] = str(document["digest"])
            case "row":
                result = document["result"]
                RowResult.from_json(result)
                place = (self._size, len(line))
                self._keep(result, document["digest"], place, is_of_this_start=False)
            case _:
                pass  # a later version's

    def _keep(
        self,
        result: dict[str, Any],
        digest: str,
        place: tuple[int, int],
        *,
        is_of_this_start: bool,
    ) -> None:
        self._entries[result["id"]] = _Entry(
            row=result["row"],
            status=result["status"],
            digest=digest,
            file=result["file"],
            file_bytes=result["file_bytes"],
            place=place,
            is_of_this_start=is_of_this_start,
        )


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed batches of this host were writing; the lock says that none writes now."""
    for root, _, names in os.walk(folder):
        for name in names:
            if not name.startswith((".picture.tmp-", ".results.parquet.tmp-")):
                continue
            owner = temp_owner(name)
            if owner is not None and owner.is_this_host and not owner.is_alive:
                (Path(root) / name).unlink(missing_ok=True)


def _foreign(path: Path) -> str:
    return f"{path} is no journal of a batch that this version reads; choose another output folder"

"""What happened in a run, line by line: `journal.jsonl` beside the reports of its stages.

Each line is one JSON document that is complete when it is there, so that a run that is killed
leaves what it did until then. A disk that cannot hold a journal is no error of the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.display import Display

SCHEMA = "exeunt.journal/1"
NAME = "journal.jsonl"
MAX_LINE_NBYTES = 8 * 2**20


class Journal:
    """The journal of one run; its folder appears with the first line.

    Args:
        folder: Where the run's reports lie.
        header: What the first line says of the run.
        complain: Called once, with a sentence, when the journal cannot be written.
    """

    def __init__(
        self, folder: Path, header: Mapping[str, Any], complain: Callable[[str], None]
    ) -> None:
        self._path = folder / NAME
        self._header: dict[str, Any] | None = {"schema": SCHEMA, **header}
        self._complain = complain
        self._is_broken = False

    def write(self, event: str, **fields: Any) -> None:
        """Append one line: the event, the time in seconds since 1970, and plain JSON values."""
        if self._is_broken:
            return
        lines = b""
        if self._header is not None:
            lines += _line("run", self._header)
        lines += _line(event, fields)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, lines)  # in one piece: lines of a flow's threads do not mix
            finally:
                os.close(fd)
        except OSError as error:
            self._is_broken = True
            self._complain(
                f"the run's journal is not kept: {error}; see that {self._path.parent} can be "
                "written"
            )
        self._header = None


def _line(event: str, fields: Mapping[str, Any]) -> bytes:
    document = {"event": event, "at": round(time.time(), 3), **fields}
    return json.dumps(document, ensure_ascii=True).encode("ascii") + b"\n"


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's journal; a line that was cut off or is no JSON object is left out."""
    try:
        with (folder / NAME).open("rb") as file:
            return list(_documents(file))
    except FileNotFoundError:
        return []


def _documents(file: Any) -> Iterator[dict[str, Any]]:
    while line := file.readline(MAX_LINE_NBYTES):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and isinstance(document.get("event"), str):
            yield document


class JournalDisplay:
    """A display that notes phases and warnings in a journal and passes everything on."""

    def __init__(self, inner: Display, journal: Journal) -> None:
        self._inner, self._journal = inner, journal

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._journal.write("phase_begins", stage=stage, num_requests=num_requests)
        self._inner.phase_begins(stage, num_requests)

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        self._inner.step(stage, label, activity, step, num_steps)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._inner.request_ends(stage, label, cached=cached, elapsed_s=elapsed_s)

    def phase_ends(self, stage: str) -> None:
        self._journal.write("phase_ends", stage=stage)
        self._inner.phase_ends(stage)

    def saved(self, path: str) -> None:
        self._journal.write("saved", path=path)
        self._inner.saved(path)

    def warn(self, message: str) -> None:
        self._journal.write("warning", message=message)
        self._inner.warn(message)

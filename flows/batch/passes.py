"""Rows of a batch through the phases, a chunk of them at a time, one stage process a phase.

A row is its family's flow. It runs until it comes to a phase whose turn is later, and starts
again in that phase's pass, where it recalls what it had. A pass takes the lowest stage that any
row waits for; its process ends before the next pass, for until then the device is not free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, get_args

from flows.batch.ahead import AheadSession
from flows.batch.backlog import Backlog
from flows.batch.display import BatchDisplay, RowDisplay
from flows.batch.errors import BatchStopped
from flows.batch.journal import Journal
from flows.batch.results import RowResult
from flows.batch.row_work import RowFile, RowWork
from flows.batch.rows import PreparedRow
from flows.batch.scope import RowPaused, in_scope
from flows.batch.shared_phase import SharedPhase
from flows.launch import shared_launcher
from flows.prefect_api import ServerError
from flows.run import Run
from flows.saved_files import SavedFile
from stages.contracts import StageName
from stages.errors import (
    ArtifactError,
    ArtifactMissing,
    DependencyError,
    ModelError,
    RequestError,
    StageCancelled,
)
from stages.finished import finished
from stages.media import Settings, write_file
from stages.saving import SaveAs

ENDS_BATCH = (ArtifactError, DependencyError, ModelError, ServerError, StageCancelled)
"""Errors that the next row would meet as well."""

_ORDER = {stage: number for number, stage in enumerate(get_args(StageName))}


class Passes:
    """Runs rows of one family; the scope of the flow of each.

    Args:
        function: The family's flow function.
        journal: Is told what became of each row; its folder gets the files.
        run_id: The batch's flow run, whose reports folder gets those of every stage request.
        display: Is told as rows come and go.
        backlog: Is told of each task run.
        may_replace: Whether files that this batch has not made may be replaced.
        max_failures: Failed rows that end the batch; None: it never ends for them.

    Attributes:
        work: The row at work.
        made: Digests of the requests of a fresh batch that were computed in it.
        is_looking_ahead: Whether its flow runs only to tell its next request.
        inspected: Runs that know what their model's phases take.
        has_sent: Whether that has gone to the process.
        num_ended: Rows that are done or have failed.
    """

    def __init__(
        self,
        *,
        function: Callable[..., Sequence[SavedFile]],
        journal: Journal,
        run_id: str,
        display: BatchDisplay,
        backlog: Backlog,
        may_replace: bool = False,
        max_failures: int | None = None,
    ) -> None:
        self.work: RowWork
        self.backlog = backlog
        self.made: set[str] = set()
        self.is_looking_ahead = self.has_sent = False
        self._function, self._journal, self._run_id = function, journal, run_id
        self._display = display
        self._may_replace, self._max_failures = may_replace, max_failures
        self._stage: StageName = "inspect"
        self.inspected: set[Run] = set()
        self._runs: dict[str, Run] = {}
        self._phases: dict[tuple[int, StageName], SharedPhase] = {}
        self._phase: SharedPhase | None = None
        self._sessions: dict[StageName, AheadSession] = {}
        self.num_ended = self._num_failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with ExitStack() as stack:
            for session in self._sessions.values():
                stack.callback(session.close)

    def run_chunk(self, rows: Sequence[PreparedRow]) -> None:
        """Take rows through all their phases.

        Raises:
            StageError: What no row can get past, or too many failed.
        """
        waiting = [RowWork(row) for row in rows]
        while waiting:
            self._stage = min((work.waits_for for work in waiting), key=_ORDER.__getitem__)
            turn = [work for work in waiting if work.waits_for == self._stage]
            self._display.phase_begins(self._stage, len(turn))
            try:
                ended = self._take_turns(turn)
            finally:
                self._leave_stage()
                self._display.phase_ends(self._stage)
            waiting = [work for work in waiting if id(work) not in ended]

    def _take_turns(self, turn: Sequence[RowWork]) -> set[int]:
        """Run each row up to its next phase; the ids of those that have ended."""
        ended = set()
        is_sent = False
        for work, following in zip(turn, [*turn[1:], None], strict=True):
            # No row may wait for, or die of, one behind it: the next is sent after this one.
            is_sent = (is_sent and self._is_at_work()) or self._sends_ahead(work)
            is_sent = is_sent and following is not None and self._sends_ahead(following)
            if self._advance(work):
                ended.add(id(work))
        return ended

    def _sends_ahead(self, work: RowWork) -> bool:
        """Have the process get a row's request before the row's turn has come, if it is open."""
        self.work, self.is_looking_ahead, self.has_sent = work, True, False
        work.rewind()
        try:
            with in_scope(self):
                self._function(**work.row.arguments)
        except RowPaused:
            pass
        except Exception:
            pass  # it shows again when the row's turn has come
        finally:
            self.is_looking_ahead = False
        return self.has_sent

    def _is_at_work(self) -> bool:
        session = self._sessions.get(self._stage)
        return session is not None and session.is_at_work

    def _leave_stage(self) -> None:
        if (session := self._sessions.get(self._stage)) is not None:
            session.rest()
        for phase in self._phases.values():
            phase.leave()

    def _advance(self, work: RowWork) -> bool:
        """Run a row up to its next phase; whether it has ended."""
        self.work = work
        work.rewind()
        try:
            with in_scope(self):
                (saved,) = self._function(**work.row.arguments)
        except RowPaused as paused:
            work.waits_for = paused.stage
            return False
        except ArtifactMissing as error:
            if work.begin_again():
                return False
            self._fail(work, error)
        except ENDS_BATCH:
            raise
        except Exception as error:
            if _is_prefects(error):
                raise ServerError(
                    f"the Prefect server failed while row {work.row.id} was at work: {error!r}; "
                    "see `exeunt status`, and start the batch again"
                ) from error
            self._fail(work, error)
        else:
            self._end(work, work.done(saved.digest, self._run_id))
        return True

    def _fail(self, work: RowWork, error: Exception) -> None:
        self._end(work, work.failed(error, self._run_id))
        self._num_failed += 1
        if self._max_failures is not None and self._num_failed >= self._max_failures:
            raise BatchStopped(
                f"{self._num_failed} rows have failed, the last one, {work.row.id}, with: {error}; "
                "see the results, correct what is wrong and start the batch again"
            ) from error

    def _end(self, work: RowWork, result: RowResult) -> None:
        self._journal.add(result, work.row)
        self.num_ended += 1
        self._display.row_ends(result)

    # ---- what the row's flow asks for ------------------------------------------------------

    def run(self, arguments: Mapping[str, Any], make: Callable[..., Run]) -> Run:
        """See `RowScope.run`."""
        own = dict(arguments) | {"run_id": self._run_id}
        key = repr(sorted((name, repr(value)) for name, value in own.items() if name != "model"))
        run = self._runs.get(key)
        if self.is_looking_ahead and (run is None or run not in self.inspected):
            raise RowPaused("inspect")  # which is not for a look ahead to do
        if run is None:
            run = self._runs[key] = make(**own)
            run.display = RowDisplay(run.display, lambda: self.work)
        return run

    def phase(self, run: Run, stage: StageName) -> SharedPhase:
        """See `RowScope.phase`."""
        if stage != self._stage and not self.work.is_recalling:
            raise RowPaused(stage)
        key = (id(run), stage)
        if key not in self._phases:
            self._phases[key] = SharedPhase(run, stage, self._session(run, stage), self)
        self._phase = self._phases[key]
        return self._phase

    def _session(self, run: Run, stage: StageName) -> AheadSession:
        if stage not in self._sessions:
            self._sessions[stage] = AheadSession(
                stage,
                shared_launcher(run.settings.launch),
                timeout_s=run.timeout_s,
                on_event=lambda event: self._phase.tell(event) if self._phase else None,
            )
        return self._sessions[stage]

    def save(self, content: bytes, save_as: SaveAs, settings: Settings, *, embed: bool) -> Path:
        """See `RowScope.save`; a file of the row's name that is not its own stays.

        Raises:
            RequestError: There is such a file.
        """
        row, output = self.work.row, self._journal.output
        settings = replace(settings, row_id=row.id)
        content = finished(content, save_as, settings if embed else None)
        path = output / row.file_name
        if not self._may_take(row, path, content):
            raise RequestError(
                f"file {path} is there already and is not this batch's; move it away or allow "
                "its replacement with --overwrite"
            )
        sha256 = hashlib.sha256(content).hexdigest()
        self._journal.saving(row, sha256)
        path = write_file(content, output, save_as.extension, name=row.file_name, overwrite=True)
        self.work.file = RowFile(
            name=path.relative_to(output).as_posix(),
            size=len(content),
            sha256=sha256,
            media_type=save_as.media_type,
            settings=settings,
        )
        return path

    def _may_take(self, row: PreparedRow, path: Path, content: bytes) -> bool:
        if self._may_replace or not path.exists() or self._journal.is_own(row):
            return True
        return path.stat().st_size == len(content) and path.read_bytes() == content


def _is_prefects(error: Exception) -> bool:
    """Whether it is the server that fails, and not the row."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    return isinstance(error, HTTPError | PrefectException)

"""How a batch tells people where it stands: phase, rows, rate and what is left.

A batch's display is a run's display that also hears of rows: `flows.display` says which is
chosen, and how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO, runtime_checkable

from flows.batch.progress import Plan, Progress, plan_sentence
from flows.batch.results import RowResult
from flows.batch.row_work import RowWork
from flows.display import NAME_WIDTH, Display, JsonDisplay
from stages.rules import escape_for_terminal

LINE_EVERY_S = 10.0
"""Seconds between two lines of a phase's progress in a log."""


@runtime_checkable
class BatchDisplay(Display, Protocol):
    """What a batch tells; every method returns at once."""

    def checks(self, num_rows: int) -> None:
        """So many rows of the table were read and checked."""

    def batch_begins(self, plan: Plan) -> None:
        """All rows were checked; the good ones are about to run."""

    def row_ends(self, result: RowResult) -> None:
        """A row is done or has failed."""

    def batch_ends(self) -> None:
        """No row is left."""


class BatchLines:
    """Plain lines: one for each row that ends, and the state every ten seconds.

    Args:
        write: Takes a line, and whether it is a warning.
    """

    def __init__(self, write: Callable[[str, bool], None]) -> None:
        self._write = write
        self._progress = Progress()
        self._spoke_at = 0.0

    def checks(self, num_rows: int) -> None:
        if time.monotonic() - self._spoke_at > LINE_EVERY_S:
            self._say(f"{num_rows} rows checked")

    def batch_begins(self, plan: Plan) -> None:
        self._progress.batch_begins(plan)
        self._say(plan_sentence(plan))

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._progress.phase_begins(stage, num_requests)
        self._say(f"{stage:<{NAME_WIDTH}} {num_requests} rows")

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        pass

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._progress.request_ends(stage, elapsed_s)
        if time.monotonic() - self._spoke_at > LINE_EVERY_S:
            self._say(self._progress.sentence())

    def row_ends(self, result: RowResult) -> None:
        self._progress.row_ends(result)
        is_done = result.status == "done"
        told = result.file if is_done else f"{result.error_type}: {result.error}"
        self._write(f"row {result.id} {result.status}: {told}", not is_done)

    def batch_ends(self) -> None:
        self._say(self._progress.sentence())

    def phase_ends(self, stage: str) -> None:
        pass

    def saved(self, path: str) -> None:
        pass  # told with the row

    def warn(self, message: str) -> None:
        self._write(f"warning: {message}", True)

    def _say(self, text: str) -> None:
        self._spoke_at = time.monotonic()
        self._write(text, False)


def to_stream(stream: TextIO) -> BatchLines:
    """Lines for pipes, files and dumb terminals."""

    def write(text: str, _: bool) -> None:
        print(escape_for_terminal(text), file=stream, flush=True)

    return BatchLines(write)


def to_log(logger: logging.Logger | logging.LoggerAdapter[Any]) -> BatchLines:
    """Lines in the log of the flow run."""

    def write(text: str, is_warning: bool) -> None:
        level = logging.WARNING if is_warning else logging.INFO
        logger.log(level, "%s", escape_for_terminal(text))

    return BatchLines(write)


class BatchJson(JsonDisplay):
    """One JSON document a line: for programs."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._progress = Progress()

    def checks(self, num_rows: int) -> None:
        self._print(event="checks", num_rows=num_rows)

    def batch_begins(self, plan: Plan) -> None:
        self._progress.batch_begins(plan)
        fields = {"num_rows": plan.num_rows, "num_open": plan.num_open, "num_bad": plan.num_bad}
        self._print(
            event="batch_begins", **fields, forecast_s=plan.forecast_s, forecast=plan.forecast
        )

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._progress.phase_begins(stage, num_requests)
        super().phase_begins(stage, num_requests)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._progress.request_ends(stage, elapsed_s)
        super().request_ends(stage, label, cached=cached, elapsed_s=elapsed_s)

    def row_ends(self, result: RowResult) -> None:
        self._progress.row_ends(result)
        fields = {"id": result.id, "row": result.row, "status": result.status}
        fields |= {"file": result.file, "error_type": result.error_type, "error": result.error}
        self._print(event="row_ends", **fields, **self._progress.state())

    def batch_ends(self) -> None:
        self._print(event="batch_ends", **self._progress.state())

    def saved(self, path: str) -> None:
        pass  # told with the row


class RowDisplay:
    """A run's display in a batch: what a row is warned of belongs to the row, and is said once.

    Args:
        inner: Of the run.
        work: Gives the row at work.
    """

    def __init__(self, inner: Display, work: Callable[[], RowWork]) -> None:
        self._inner, self._work = inner, work

    def phase_begins(self, stage: str, num_requests: int) -> None:
        pass  # to inspect the model is a small part of the phase that goes on

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        self._inner.step(stage, label, activity, step, num_steps)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        if stage != "inspect":
            self._inner.request_ends(stage, label, cached=cached, elapsed_s=elapsed_s)

    def phase_ends(self, stage: str) -> None:
        pass

    def saved(self, path: str) -> None:
        self._inner.saved(path)

    def warn(self, message: str) -> None:
        work = self._work()
        if work.warn(message):
            self._inner.warn(f"row {work.row.id}: {message}")

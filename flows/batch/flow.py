"""The batch as a Prefect flow: a table's rows through a family's flow, chunk by chunk.

Each chunk is a sub-flow, so that Prefect lets go of what it keeps of its task runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.batch import prepare, results
from flows.batch.backlog import Backlog, recorded_task_runs
from flows.batch.chunks import run_in_sub_flow
from flows.batch.display import BatchDisplay, to_log
from flows.batch.errors import TableError
from flows.batch.families import BatchFamily, batch_family
from flows.batch.forecast import BatchForecast, forecast_batch
from flows.batch.journal import Journal
from flows.batch.page import Artifacts, BatchPage
from flows.batch.passes import Passes
from flows.batch.progress import Plan
from flows.batch.scope import remembering
from flows.display import current_display, showing
from flows.row_names import DEFAULT_TEMPLATE
from flows.settings import RunSettings
from flows.table_columns import BATCH_WIDE
from stages.contracts import Record
from stages.errors import RequestError

logger = logging.getLogger(__name__)

DEFAULT_CHUNK = 500
MAX_CHUNK = 5_000
"""Rows of a chunk: three task runs each, which Prefect keeps until their flow run ends."""

MOST_NAMED = 5


class BatchSummary(Record):
    """What became of a batch.

    Attributes:
        output: The folder with the files and the results.
        results: The results' table.
        num_rows: Rows of the table.
        num_done, num_failed, num_invalid: Of them.
        num_run: Rows that this start has run; the others were finished, or bad.
    """

    output: str
    results: str
    num_rows: int
    num_done: int
    num_failed: int
    num_invalid: int
    num_run: int

    @property
    def is_whole(self) -> bool:
        """Whether each row has its file."""
        return self.num_done == self.num_rows


def _run_name() -> str:
    given = flow_run.parameters
    return f"batch {given.get('family')} {given.get('table')}"[:200]


@flow(name="batch", flow_run_name=_run_name, persist_result=False)
def batch(
    table: str,
    family: str,
    arguments: dict[str, Any] | None = None,
    output: str = "batch",
    name: str = DEFAULT_TEMPLATE,
    chunk: int = DEFAULT_CHUNK,
    retry: Literal["failed", "done"] | None = None,
    strict: bool = False,
    overwrite: bool = False,
    max_failures: int | None = None,
    forecast: bool = True,
) -> BatchSummary:
    """Run a family's flow for every row of a table, phase by phase.

    Args:
        table: A parquet, CSV or JSON lines file, or a folder of such files.
        family: The command of the family, such as z-image.
        arguments: Of the family's flow: for rows that leave them empty, and for all rows.
        output: Folder for the files, the journal and the results.
        name: Makes a file name of a row's values, such as {row:05d}-{prompt}.
        chunk: Rows that go through the phases together, 1 to 5000.
        retry: Run rows again that an earlier start left failed, or done.
        strict: Refuse the batch if any row is bad.
        overwrite: Replace files of the rows' names that this batch has not made.
        max_failures: Failed rows that end the batch; by default it never ends for them.
        forecast: Refuse a batch that disk or memory cannot hold.
    """
    _check(chunk, max_failures)
    own = batch_family(family)
    defaults = _defaults(own, arguments or {})
    retried = [] if retry is None else [retry]
    artifacts = Artifacts(flow_run.id or "")
    with (
        remembering(),
        Journal.open(output, retry=retried) as journal,
        BatchPage(_display(), journal, RunSettings.from_env(), artifacts.put) as display,
        showing(display),
    ):
        for warning in journal.warnings:
            display.warn(warning)
        prepared = prepare.read(
            table,
            own,
            defaults,
            journal=journal,
            template=name,
            overwrite=overwrite,
            tell=display.checks,
        )
        if strict and prepared.bad:
            raise TableError(_bad_rows(prepared))
        for bad in prepared.bad:
            journal.add(bad)
            display.row_ends(bad)
        expected = _forecast(prepared, journal, may_refuse=forecast)
        display.batch_begins(_plan(prepared, expected))
        about = _about(own, prepared, table, defaults)
        about["forecast"] = _kept_forecast(expected, journal.output)
        chunk_runs: list[str] = []
        passes = Passes(
            function=own.function,
            journal=journal,
            run_id=flow_run.id or "",
            display=display,
            backlog=Backlog(recorded_task_runs(lambda: chunk_runs)),
            may_replace=overwrite,
            max_failures=max_failures,
        )
        try:
            with passes:
                for number, rows in enumerate(prepared.chunks(chunk), 1):
                    if number > 1:
                        results.write(journal.output, journal.results(), about)
                    run_in_sub_flow(number, rows, passes, chunk_runs)
        finally:
            path = results.write(journal.output, journal.results(), about)
        display.batch_ends()
        counts = journal.counts()
    return BatchSummary(
        output=str(journal.output),
        results=str(path),
        num_rows=prepared.count,
        num_done=counts["done"],
        num_failed=counts["failed"],
        num_invalid=counts["invalid"],
        num_run=passes.num_ended,
    )


# ---- what was asked for --------------------------------------------------------------------


def _check(chunk: int, max_failures: int | None) -> None:
    if not 1 <= chunk <= MAX_CHUNK:
        raise RequestError(f"chunk is {chunk}, allowed are 1 to {MAX_CHUNK} rows")
    if max_failures is not None and max_failures < 1:
        raise RequestError(f"max_failures is {max_failures}, allowed are 1 and more")


def _defaults(family: BatchFamily, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(arguments) - family.shared):
        raise RequestError(
            f"arguments has {', '.join(unknown)}, which {family.name} does not take for all rows; "
            f"allowed are {', '.join(sorted(family.shared))}"
        )
    if missing := sorted((family.required & BATCH_WIDE) - arguments.keys()):
        raise RequestError(
            f"{family.name} needs {', '.join(missing)}, one for all rows; give "
            f"--{missing[0].replace('_', '-')}"
        )
    return dict(arguments)


def _forecast(
    prepared: prepare.Prepared, journal: Journal, *, may_refuse: bool
) -> BatchForecast | None:
    """What the rows that are to run will take; None if there are none.

    Raises:
        RequestError: They cannot fit.
    """
    if not prepared.jobs:
        return None
    found = forecast_batch(prepared.jobs, prepared.job, journal.output, RunSettings.from_env())
    if may_refuse:
        found.check()
    return found


def _plan(prepared: prepare.Prepared, expected: BatchForecast | None) -> Plan:
    """What the batch is about to do."""
    return Plan(
        num_rows=prepared.count,
        num_open=prepared.num_open,
        num_bad=len(prepared.bad),
        forecast_s={} if expected is None else dict(expected.seconds),
        forecast="" if expected is None else expected.sentence(),
    )


def _bad_rows(prepared: prepare.Prepared) -> str:
    told = "; ".join(str(bad.error) for bad in prepared.bad[:MOST_NAMED])
    more = len(prepared.bad) - MOST_NAMED
    return (
        f"{len(prepared.bad)} of {prepared.count} rows cannot run: {told}"
        + (f"; and {more} more" if more > 0 else "")
        + "; correct them, or leave out --strict to run the others"
    )


def _kept_forecast(expected: BatchForecast | None, output: Path) -> dict[str, Any] | None:
    """The forecast and its run; that of the start before if this one has no rows to run."""
    if expected is not None:
        return expected.to_json() | {"run_id": flow_run.id}
    found: dict[str, Any] | None = results.read_about(output / results.NAME).get("forecast")
    return found


def _about(
    family: BatchFamily, prepared: prepare.Prepared, table: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    model = prepared.model
    return {
        "family": family.name,
        "model": None if model is None else str(model.directory),
        "model_name": None if model is None else model.directory.name,
        "dtype": arguments.get("dtype", "auto"),
        "device": arguments.get("device", "auto"),
        "table": str(table),
        "num_rows": prepared.count,
        "started_at": datetime.now(UTC).isoformat(),
        "run_id": flow_run.id,
    }


def _display() -> BatchDisplay:
    """The chosen display if it hears of rows, else the log of the flow run."""
    chosen = current_display()
    if isinstance(chosen, BatchDisplay):
        return chosen
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return to_log(get_run_logger())
    except MissingContextError:
        return to_log(logging.getLogger(__name__))

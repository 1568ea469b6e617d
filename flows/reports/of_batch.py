"""The report of a batch, out of its results, its journal and the reports of its runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.batch import results
from flows.batch.journal import NAME as JOURNAL_NAME
from flows.batch.results import RowResult
from flows.reports.against_forecast import compared
from flows.reports.data import Failure, Item, Report
from flows.reports.journal import read_journal
from flows.reports.measures import (
    bands_of,
    fallbacks_of,
    memory_lines,
    read_stage_reports,
    stage_totals,
)
from flows.reports.of_run import Document, facts_of, found_of, saved_lines
from stages.errors import RequestError

NOT_SETTINGS = frozenset(("id", "row", "status", "error_type", "error", "file", "finished_at"))


def is_batch(folder: Path) -> bool:
    """Whether a batch has worked in a folder."""
    return (folder / results.NAME).is_file() or (folder / JOURNAL_NAME).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResults:
    """What stands in a batch's output folder.

    Attributes:
        rows: In the order of the table.
        about: Of the batch's last start; empty if none has come to its first results.
        reports: Folders of its runs' reports that are kept here.
        num_lost: Runs whose reports are not kept here.
    """

    rows: Sequence[RowResult]
    about: Mapping[str, Any] = field(default_factory=dict)
    reports: Sequence[Path] = ()
    num_lost: int = 0


def read_batch(output: Path, reports: Path) -> BatchResults:
    """The results in a batch's folder.

    Args:
        output: The batch's output folder.
        reports: The folder that holds one folder for each run.

    Raises:
        RequestError: No batch has worked there, or its results cannot be read.
    """
    about: Mapping[str, Any] = {}
    path = output / results.NAME
    try:
        if path.is_file():
            rows, about = results.read(path), results.read_about(path)
        else:  # it was killed in its first chunk, or is in it
            rows = _journal_rows(output / JOURNAL_NAME)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"the results of the batch in {output} cannot be read: {error}") from (
            error
        )
    run_ids = dict.fromkeys([*(row.run_id for row in rows), str(about.get("run_id") or "")])
    named = [reports / run_id for run_id in run_ids if run_id]
    kept = [folder for folder in named if folder.is_dir()]
    return BatchResults(rows=rows, about=about, reports=kept, num_lost=len(named) - len(kept))


def _journal_rows(path: Path) -> list[RowResult]:
    """The last result of each row; a line that was cut off is left out."""
    found: dict[str, RowResult] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if document["event"] == "row":
                row = RowResult.from_json(document["result"])
                found[row.id] = row
    return sorted(found.values(), key=lambda row: row.row)


def batch_report(output: Path, reports: Path) -> Report:
    """The report of the batch that has worked in `output`; see `read_batch`."""
    batch = read_batch(output, reports)
    rows, about = batch.rows, batch.about
    lines = [line for folder in batch.reports for line in read_journal(folder)]
    stage_reports = [each for folder in batch.reports for each in read_stage_reports(folder)]
    header: Document = next((line for line in reversed(lines) if line["event"] == "run"), {})
    found = found_of(lines)
    moments = [float(line["at"]) for line in lines]
    moments += [row.finished_at.timestamp() for row in rows]
    fallbacks = fallbacks_of(stage_reports)
    return Report(
        title=_title(about or header, rows),
        run_id=str(about.get("run_id") or header.get("run_id") or ""),
        state=_state(rows, about),
        begin=min(moments, default=None),
        end=max(moments, default=None),
        facts=_facts(batch, header, stage_reports, output),
        items=_items(rows, lines, output),
        failures=[_failure(row) for row in rows if row.status != "done"],
        warnings={text: n for text, n in _warnings(rows, lines).items() if text not in fallbacks},
        fallbacks=fallbacks,
        totals=stage_totals(stage_reports, found),
        lines=memory_lines(stage_reports),
        bands=bands_of(stage_reports),
        found=found,
        forecast=compared(rows, about, batch.reports),
        header=header,
        folder=output,
        is_batch=True,
    )


def _title(about: Mapping[str, Any], rows: Sequence[RowResult]) -> str:
    table = Path(str(about.get("table") or "")).name
    return f"{about.get('family') or 'batch'}: {about.get('num_rows', len(rows)):,} rows" + (
        f" of {table}" if table else ""
    )


def _state(rows: Sequence[RowResult], about: Mapping[str, Any]) -> str:
    if not about or len(rows) < about["num_rows"]:
        return "unfinished"
    return "finished" if all(row.status == "done" for row in rows) else "failed"


def _facts(
    batch: BatchResults, header: Document, stage_reports: Sequence[Document], output: Path
) -> dict[str, str]:
    counts = Counter(row.status for row in batch.rows)
    num_cached = sum(row.cached for row in batch.rows)
    told = ", ".join(f"{n:,} {status}" for status, n in sorted(counts.items()))
    missing = int(batch.about.get("num_rows", len(batch.rows))) - len(batch.rows)
    facts = {
        "table": str(batch.about.get("table") or ""),
        "rows": told + (f", {missing:,} not yet run" if missing else ""),
        "found": f"{num_cached:,} rows of which every stage's result was in the store",
        "folder": str(output),
        **facts_of(header, stage_reports),
        "missing": f"reports of {batch.num_lost} runs are not kept here" if batch.num_lost else "",
    }
    return {name: text for name, text in facts.items() if text}


def _items(rows: Iterable[RowResult], lines: Iterable[Document], output: Path) -> list[Item]:
    saved = saved_lines(lines)
    by_digest = {str(line.get("digest")): line for line in saved.values()}
    return [_item(row, saved, by_digest, output) for row in rows]


def _item(
    row: RowResult, saved: Mapping[str, Document], by_digest: Mapping[str, Document], output: Path
) -> Item:
    path = output / row.file if row.file else None
    line = saved.get(str(path)) or by_digest.get(str(row.picture_sha256)) or {}
    asked = {name: value for name, value in row.to_json().items() if name not in NOT_SETTINGS}
    return Item(
        name=path.name if path is not None else row.id,
        path=path,
        media_type=row.media_type or "",
        status=row.status,
        is_cached=row.cached,
        elapsed_s=sum(row.seconds.values()) if row.seconds or row.cached else None,
        prompt=row.prompt or "",
        seed=row.seed,
        row_id=row.id,
        error=": ".join(text for text in (row.error_type, row.error) if text),
        settings=line.get("settings") or asked,
        parameters=str(line.get("parameters", "")),
    )


def _failure(row: RowResult) -> Failure:
    return Failure(
        what=row.id, stage=row.phase or "", kind=row.error_type or "", reason=row.error or ""
    )


def _warnings(rows: Iterable[RowResult], lines: Iterable[Document]) -> Counter[str]:
    """What rows were warned of, and the batch as a whole, each with how often."""
    told = Counter(text for row in rows for text in row.warnings)
    whole = (str(line["message"]) for line in lines if line["event"] == "warning")
    told.update(text for text in whole if not text.startswith("row "))
    return told

"""Runs as a dataset of parquet files that other tools read: a row per request, and per file.

Each run is one file in each table, named by its run and written whole: a run that is exported
again takes the place of its earlier file, and two exports at a time do not disturb each other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flows.reports.dataset_rows import FILES, REQUESTS, SCHEMA, file_rows, request_rows, schema
from flows.reports.journal import read_journal
from flows.reports.measures import stage_reports
from stages.errors import ArtifactError, RequestError
from stages.file_writes import flush_file, raise_write_error, temp_name

logger = logging.getLogger(__name__)

CHUNK_ROWS = 2_000
"""Rows of one row group: those of a large batch are never all in memory."""

_SOURCE = b"exeunt.source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export did.

    Attributes:
        num_written: Runs that were written.
        num_unchanged: Runs that the dataset had as they are.
        num_empty: Runs that have left nothing, such as those cut off at their start.
        num_unread: Runs whose journal or reports this version does not understand.
    """

    num_written: int
    num_unchanged: int
    num_empty: int
    num_unread: int


def export(folders: Iterable[Path], dataset: Path) -> Exported:
    """Put runs into a dataset.

    Args:
        folders: Of the runs, with their journals and stage reports.
        dataset: Its folder; created if need be.

    Raises:
        RequestError: The dataset cannot be written.
    """
    counts = Counter[str]()
    try:
        for folder in folders:
            try:
                counts[_export_run(folder, dataset)] += 1
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("the run of %s is left out: %r", folder, error)
                counts["unread"] += 1
    except ArtifactError as error:
        raise RequestError(
            f"the dataset cannot be written: {error}; name another folder with --dataset"
        ) from error
    return Exported(
        num_written=counts["written"],
        num_unchanged=counts["unchanged"],
        num_empty=counts["empty"],
        num_unread=counts["unread"],
    )


def _export_run(folder: Path, dataset: Path) -> str:
    source = _source(folder)
    lines = read_journal(folder)
    header: Mapping[str, Any] = next(
        (line for line in reversed(lines) if line["event"] == "run"), {}
    )
    began = _began(folder, lines)
    if began is None:
        return "empty"
    partition = Path(f"family={quote(str(header.get('family') or 'unknown'), safe='')}")
    partition /= f"date={datetime.fromtimestamp(began, UTC):%Y-%m-%d}"
    name = f"{folder.name}.parquet"
    kept = dataset / REQUESTS / partition / name
    if _has(kept, source):
        return "unchanged"
    # The table of requests comes last: it says that the run is there.
    _write(dataset / FILES / partition / name, FILES, file_rows(folder.name, lines), source)
    rows = request_rows(folder.name, header, lines, stage_reports(folder))
    _write(kept, REQUESTS, rows, source)
    return "written"


def _began(folder: Path, lines: list[dict[str, Any]]) -> float | None:
    """When the run began, in seconds since 1970; None if it has left nothing."""
    if lines:
        return float(lines[0]["at"])
    first = next(stage_reports(folder), None)
    return None if first is None else float(first["started_at"])


def _source(folder: Path) -> bytes:
    """Changes whenever what a run has left does, or the version that reads it."""
    files = [each.stat() for each in folder.iterdir() if each.suffix in (".json", ".jsonl")]
    newest = max((each.st_mtime_ns for each in files), default=0)
    size = sum(each.st_size for each in files)
    return f"{metadata.version('exeunt')} {SCHEMA} {len(files)} {size} {newest}".encode("ascii")


def _has(path: Path, source: bytes) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(OSError, pa.ArrowInvalid):  # absent, or cut off by another program
        found: Mapping[bytes, bytes] = pq.read_schema(path).metadata or {}
        return found.get(_SOURCE) == source
    return False


def _write(path: Path, table: str, rows: Iterator[dict[str, Any]], source: bytes) -> None:
    """Write a run's rows of one table; without any, no file is written.

    Raises:
        ArtifactError: No space, no permission, or another failure to write.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    chunk = list(islice(rows, CHUNK_ROWS))
    if not chunk:
        return
    columns = schema(table).with_metadata({"exeunt.schema": SCHEMA, _SOURCE: source})
    partial = path.parent / temp_name(f".{path.name}")  # readers pass over names with a dot
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, columns, compression="zstd") as writer:
            while chunk:
                writer.write_table(pa.Table.from_pylist(chunk, schema=columns))
                chunk = list(islice(rows, CHUNK_ROWS))
        flush_file(partial)
        partial.replace(path)
    except OSError as error:
        raise_write_error(error, path.parent, 0)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)

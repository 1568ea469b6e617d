"""What a batch was forecast to take, beside what its rows took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.batch.results import RowResult
from flows.reports.charts import duration, size
from flows.reports.data import Compared
from flows.reports.journal import read_journal
from stages.artifacts import open_store
from stages.errors import ArtifactError


def compared(
    rows: Sequence[RowResult], about: Mapping[str, Any], reports: Sequence[Path]
) -> list[Compared]:
    """Forecast and measurement of the rows that the last start that had any has run.

    Args:
        rows: The batch's results.
        about: Of the batch, with the forecast that that start began with.
        reports: Folders of its runs' reports.
    """
    forecast = about.get("forecast") or {}
    run_id = forecast.get("run_id")
    own = [row for row in rows if run_id and row.run_id == run_id]
    if not own:
        return []
    found = [*_times(own, forecast)]
    host = max((row.peak_host_bytes or 0 for row in own), default=0)
    device = max((row.peak_device_bytes or 0 for row in own), default=0)
    found += _bytes("host memory of a stage", forecast["host_bytes"], host)
    found += _bytes("device memory", forecast["device_bytes"], device)
    need = sum(disk["need_bytes"] for disk in forecast["disks"])
    return found + _bytes(
        "disk, all rows", need, _written(own, [each for each in reports if each.name == run_id])
    )


def _times(rows: Sequence[RowResult], forecast: Mapping[str, Any]) -> Iterable[Compared]:
    for stage, seconds in forecast["seconds"].items():
        took = [row.seconds[stage] for row in rows if stage in row.seconds]
        if took:
            yield Compared(
                name=f"{stage}, a row",
                forecast=duration(seconds),
                happened=duration(sum(took) / len(took)),
                share=_share(sum(took) / len(took), seconds),
            )
    took_s = sum(sum(row.seconds.values()) for row in rows)
    if forecast.get("elapsed_s"):
        yield Compared(
            name=f"in stages, {len(rows):,} rows",
            forecast=duration(forecast["elapsed_s"]),
            happened=duration(took_s),
            share=_share(took_s, forecast["elapsed_s"]),
        )


def _bytes(name: str, forecast: int, happened: int) -> list[Compared]:
    if not forecast or not happened:
        return []
    share = _share(happened, forecast)
    return [Compared(name=name, forecast=size(forecast), happened=size(happened), share=share)]


def _share(happened: float, forecast: float) -> str:
    return f"{happened / forecast:.0%}" if forecast else ""


def _written(rows: Sequence[RowResult], reports: Sequence[Path]) -> int:
    """Bytes of the rows' files, of their artifacts in a local store, and of their reports."""
    nbytes = sum(row.file_bytes or 0 for row in rows)
    for folder in reports:
        nbytes += sum(path.stat().st_size for path in folder.iterdir())
        heads = (line for line in read_journal(folder) if line["event"] == "run")
        nbytes += _artifact_nbytes(rows, str(next(heads, {}).get("store") or ""))
    return nbytes


def _artifact_nbytes(rows: Iterable[RowResult], store_url: str) -> int:
    """Each artifact once; 0 for a store that is not on this machine, and so not forecast."""
    if not store_url or "://" in store_url:
        return 0
    try:
        store = open_store(store_url)
        digests = {digest for row in rows for digest in row.digests.values()}
        return sum(store.size(digest) or 0 for digest in digests)
    except ArtifactError:
        return 0

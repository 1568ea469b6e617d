"""What became of each row of a batch, and the table of it: `results.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from stages.file_writes import flush_file, flush_folder, raise_write_error, temp_name

SCHEMA = "exeunt.batch-results/1"
NAME = "results.parquet"
ROW_GROUP_ROWS = 5_000

Status = Literal["done", "failed", "invalid"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What became of one row; each field is a column of `results.parquet`.

    Attributes:
        id: As in the table.
        row: Number in the table, from 1.
        status: `done`, `failed`, or `invalid` for a row that never ran.
        error_type, error: Class of the error and the reason; None if done.
        phase: The stage that failed; None otherwise.
        file: Relative to the output folder, with `/`; None if there is none.
        file_bytes: Size of the file as written.
        file_sha256: Of the file as written, with the settings inside.
        picture_sha256: Of the picture in the store, without them.
        guidance_scale: As used; None where the model takes none.
        arguments: Every argument of the row that is not a default, as a JSON object.
        digests: Artifacts by `stage.role`.
        requests: Request digest by stage: the key of the stage's report.
        seconds: By stage, for stages that ran; one that was found is absent.
        cached: Nothing was computed for this row.
        peak_host_bytes: Largest resident memory of a stage process that worked for it.
        peak_device_bytes: Most device memory allocated by torch; None without a GPU.
        attempts: How often the row was tried.
        warnings: What was said about it.
        run_id: The flow run that finished it.
        finished_at: In UTC.
    """

    id: str
    row: int
    status: Status
    error_type: str | None = None
    error: str | None = None
    phase: str | None = None
    file: str | None = None
    media_type: str | None = None
    file_bytes: int | None = None
    file_sha256: str | None = None
    picture_sha256: str | None = None
    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    arguments: str = "{}"
    digests: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    cached: bool = False
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    attempts: int = 0
    warnings: tuple[str, ...] = ()
    run_id: str = ""
    finished_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {
            "warnings": list(self.warnings),
            "finished_at": self.finished_at.isoformat(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RowResult:
        """What `to_json` made; unknown fields, of a later version, are left out.

        Raises:
            ValueError, KeyError, TypeError: It is none.
        """
        known = {name: document[name] for name in cls.__dataclass_fields__ if name in document}
        known["warnings"] = tuple(known.get("warnings", ()))
        known["finished_at"] = datetime.fromisoformat(known["finished_at"])
        return cls(**known)


def write(output: Path, results: Iterable[RowResult], about: Mapping[str, Any]) -> Path:
    """Write `results.parquet` whole, in place of an older one; readers see the old or the new.

    Args:
        output: The batch's folder.
        results: In the order of the table.
        about: What the file says of the batch, as plain JSON values.

    Raises:
        ArtifactError: No space, no permission, or another failure to write.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = output / NAME
    partial = output / temp_name(f".{NAME}")
    schema = _schema().with_metadata(
        {"exeunt.schema": SCHEMA, "exeunt.batch": json.dumps(about, ensure_ascii=True)}
    )
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for chunk in _chunks(results, ROW_GROUP_ROWS):
                rows = [_cells(result) for result in chunk]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        flush_file(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise_write_error(error, output, 0)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(output)
    return path


def read(path: Path) -> list[RowResult]:
    """The rows of a `results.parquet`."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    maps = ("digests", "requests", "seconds")
    return [
        RowResult(
            **row | {name: dict(row[name]) for name in maps} | {"warnings": tuple(row["warnings"])}
        )
        for row in rows
    ]


def read_about(path: Path) -> dict[str, Any]:
    """What a `results.parquet` says of its batch; empty if there is none that can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid):
        return {}
    about: dict[str, Any] = json.loads(metadata.get(b"exeunt.batch", b"{}"))
    return about


def _cells(result: RowResult) -> dict[str, Any]:
    cells = {name: getattr(result, name) for name in RowResult.__dataclass_fields__}
    for name in ("digests", "requests", "seconds"):
        cells[name] = list(cells[name].items())
    cells["warnings"] = list(cells["warnings"])
    return cells


def _schema() -> Any:
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    columns = {
        "id": text, "row": whole, "status": text, "error_type": text, "error": text,
        "phase": text, "file": text, "media_type": text, "file_bytes": whole,
        "file_sha256": text, "picture_sha256": text, "prompt": text, "negative_prompt": text,
        "seed": pa.uint64(), "height": whole, "width": whole, "num_inference_steps": whole,
        "guidance_scale": pa.float64(), "arguments": text, "digests": pa.map_(text, text),
        "requests": pa.map_(text, text), "seconds": pa.map_(text, pa.float64()),
        "cached": pa.bool_(), "peak_host_bytes": whole, "peak_device_bytes": whole,
        "attempts": whole, "warnings": pa.list_(text), "run_id": text,
        "finished_at": pa.timestamp("us", tz="UTC"),
    }  # fmt: skip
    return pa.schema(list(columns.items()))


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk

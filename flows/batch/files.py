"""A row's file: under the row's own name, and in place of nothing but its own earlier one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.batch.journal import Journal
from flows.batch.rows import PreparedRow
from stages.errors import RequestError
from stages.media import Settings


def save_row_file(
    journal: Journal,
    row: PreparedRow,
    content: bytes,
    write: Callable[..., Path],
    settings: Settings | None,
    *,
    overwrite: bool,
) -> Path:
    """Write the picture or video of a row into the batch's folder; returns its absolute path.

    Args:
        write: `stages.media.write_png` or its like.
        settings: Into the file; None for none.
        overwrite: Whether a file that this batch has not made of this row may be replaced.

    Raises:
        RequestError: Such a file has appeared since the batch began.
        ArtifactError: It cannot be written.
    """
    path = journal.output / row.file_name
    replaces = overwrite or journal.is_own(row)
    if not replaces and path.exists():
        raise _in_the_way(path)
    journal.saving(row)
    written = write(
        content, journal.output, name=row.file_name, settings=settings, overwrite=replaces
    )
    if written.name != path.name:  # another program took the name within this call
        written.unlink(missing_ok=True)
        raise _in_the_way(path)
    return written


def _in_the_way(path: Path) -> RequestError:
    return RequestError(
        f"{path} has appeared since the batch began and is not of this row; move it, or allow "
        "to replace it with --overwrite, and retry the row"
    )

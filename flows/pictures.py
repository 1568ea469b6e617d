"""Finished pictures: from the store into a folder, with their settings inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.run import Run
from flows.saved_files import SavedFile, list_files, save_file
from stages.contracts import StageResult


class Picture(SavedFile):
    """One picture that was saved."""


def save_picture(run: Run, image: StageResult, *, folder: Path, **settings: Any) -> Picture:
    """Write a decoded picture into `folder` under a safe name that nothing else has.

    Args:
        image: What the decode stage made.
        settings: As for `flows.saved_files.save_file`.
    """
    return Picture(**save_file(run, image.artifacts["image-0"], folder, **settings))


def list_pictures(pictures: Sequence[Picture]) -> None:
    """Show the run's pictures as a table on the run's page; a server that cannot is no error."""
    list_files(pictures, "pictures")

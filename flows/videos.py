"""Finished videos: from the store into a folder, with their settings inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.run import Run
from flows.saved_files import SavedFile, list_files, save_file
from stages.contracts import StageResult


class Video(SavedFile):
    """One video that was saved."""


def save_video(run: Run, file: StageResult, *, folder: Path, **settings: Any) -> Video:
    """Write a decoded video into `folder` under a safe name that nothing else has.

    Args:
        file: What the decode stage made.
        settings: As for `flows.saved_files.save_file`; they become JSON in its comment.
    """
    return Video(**save_file(run, file.artifacts["video-0"], folder, **settings))


def list_videos(videos: Sequence[Video]) -> None:
    """Show the run's videos as a table on the run's page; a server that cannot is no error."""
    list_files(videos, "videos")

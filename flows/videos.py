"""Finished videos: from the store into a folder, with their settings inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.run import Run
from stages.contracts import Record, StageResult
from stages.media import Settings, write_mp4
from stages.rules import escape_for_terminal
from stages.versions import library_versions

logger = logging.getLogger(__name__)

MOST_LISTED = 500


class Video(Record):
    """One video that was saved.

    Attributes:
        path: Absolute path of the file.
        prompt: What it was made for.
        seed: Its own seed, exact.
        digest: sha256 of the video in the store, without the settings written into the file.
    """

    path: str
    prompt: str
    seed: int
    digest: str


def save_video(
    run: Run,
    file: StageResult,
    *,
    folder: Path,
    embed_settings: bool,
    prompt: str,
    seed: int,
    stages: Mapping[str, StageResult],
    **settings: Any,
) -> Video:
    """Write a decoded video into `folder` under a safe name that nothing else has.

    Args:
        file: What the decode stage made.
        embed_settings: Write all settings into the file, as JSON in its comment.
        stages: Result of each stage, to name the artifacts the video came from.
        settings: The rest of `stages.media.Settings`.
    """
    ref = file.artifacts["video-0"]
    full = Settings(
        prompt=prompt,
        seed=seed,
        scheduler=run.model.components["scheduler"].class_name,
        model=run.model_name,
        model_hashes=run.model_hashes(),
        family=run.family,
        dtype=run.dtype,
        versions=library_versions(),
        artifacts={
            f"{stage}.{role}": made.digest
            for stage, result in stages.items()
            for role, made in result.artifacts.items()
        },
        **settings,
    )
    path = _save(run.store.read(ref), folder, full if embed_settings else None, prompt, seed)
    run.keep_item(path, ref, full)
    run.display.saved(str(path))
    return Video(path=str(path), prompt=prompt, seed=seed, digest=ref.digest)


def list_videos(videos: Sequence[Video]) -> None:
    """Show the run's videos as a table on the run's page; a server that cannot is no error."""
    table = [
        {
            "file": each.path,
            "prompt": escape_for_terminal(each.prompt, limit=200),
            "seed": str(each.seed),  # a browser would round a number of twenty digits
            "artifact": each.digest[:16],
        }
        for each in videos[:MOST_LISTED]
    ]
    try:
        create_table_artifact(table, key="videos", description=f"{len(videos)} videos")
    except Exception as error:  # whatever the server says, the videos are there
        logger.warning("the run's page shows no table of its videos: %r", error)


@task(name="save", task_run_name="save-{seed}", persist_result=False, cache_policy=NO_CACHE)
def _save(mp4: bytes, folder: Path, settings: Settings | None, prompt: str, seed: int) -> Path:
    return write_mp4(mp4, folder, prompt=prompt, seed=seed, settings=settings)

"""Finished pictures: from the store into a folder, with their settings inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.run import Run
from stages.contracts import Record, StageResult
from stages.media import Settings, write_png
from stages.report import library_versions
from stages.rules import escape_for_terminal

logger = logging.getLogger(__name__)

MOST_LISTED = 500


class Picture(Record):
    """One picture that was saved.

    Attributes:
        path: Absolute path of the file.
        prompt: What it was painted for.
        seed: Its own seed, exact.
        digest: sha256 of the picture in the store, without the settings written into the file.
    """

    path: str
    prompt: str
    seed: int
    digest: str


def save_picture(
    run: Run,
    image: StageResult,
    *,
    folder: Path,
    embed_settings: bool,
    prompt: str,
    negative_prompt: str,
    seed: int,
    num_inference_steps: int,
    guidance_scale: float,
    height: int,
    width: int,
    stages: Mapping[str, StageResult],
    strength: float | None = None,
) -> Picture:
    """Write a decoded picture into `folder` under a safe name that nothing else has.

    Args:
        image: What the decode stage made.
        embed_settings: Write all settings into the file, as text and as JSON.
        stages: Result of each stage, to name the artifacts the picture came from.
        strength: Share of the noise over the picture that it started from; None for none.
    """
    ref = image.artifacts["image-0"]
    settings = Settings(
        prompt=prompt,
        negative_prompt=negative_prompt,
        seed=seed,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        strength=strength,
        scheduler=run.model.components["scheduler"].class_name,
        height=height,
        width=width,
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
    )
    path = _save(run.store.read(ref), folder, settings if embed_settings else None, prompt, seed)
    run.keep_item(path, ref, settings)
    run.display.saved(str(path))
    return Picture(path=str(path), prompt=prompt, seed=seed, digest=ref.digest)


def list_pictures(pictures: Sequence[Picture]) -> None:
    """Show the run's pictures as a table on the run's page; a server that cannot is no error."""
    table = [
        {
            "file": each.path,
            "prompt": escape_for_terminal(each.prompt, limit=200),
            "seed": str(each.seed),  # a browser would round a number of twenty digits
            "artifact": each.digest[:16],
        }
        for each in pictures[:MOST_LISTED]
    ]
    description = f"{len(pictures)} pictures"
    if len(pictures) > len(table):
        description += f", the first {len(table)} are listed"
    try:
        create_table_artifact(table, key="pictures", description=description)
    except Exception as error:  # whatever the server says, the pictures are there
        logger.warning("the run's page shows no table of its pictures: %r", error)


@task(name="save", task_run_name="save-{seed}", persist_result=False, cache_policy=NO_CACHE)
def _save(png: bytes, folder: Path, settings: Settings | None, prompt: str, seed: int) -> Path:
    return write_png(png, folder, prompt=prompt, seed=seed, settings=settings)

"""Finished files: from the store into a folder, with their settings inside, and listed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows.batch.scope import current_scope
from flows.gallery import Shown, show_gallery
from flows.run import Run
from stages.contracts import ArtifactRef, Record, StageResult
from stages.finished import finished
from stages.media import Settings, write_file
from stages.report import library_versions
from stages.rules import escape_for_terminal
from stages.saving import SaveAs

logger = logging.getLogger(__name__)

MOST_LISTED = 500


class SavedFile(Record):
    """A picture or a video that was saved.

    Attributes:
        path: Absolute path of the file.
        prompt: What it was made for.
        seed: Its own seed, exact.
        digest: sha256 of it in the store, without the settings written into the file.
    """

    path: str
    prompt: str
    seed: int
    digest: str


def save_file(
    run: Run,
    ref: ArtifactRef,
    folder: Path,
    *,
    save_as: SaveAs,
    embed_settings: bool,
    prompt: str,
    seed: int,
    stages: Mapping[str, StageResult],
    **settings: Any,
) -> dict[str, Any]:
    """Write an artifact into `folder` under a safe name that nothing else has.

    Args:
        save_as: Its format, and what it is labelled with.
        embed_settings: Write all settings into the file.
        stages: Result of each stage, to name the artifacts it came from.
        settings: The rest of `stages.media.Settings`.

    Returns:
        The fields of `SavedFile`.
    """
    full = Settings(
        prompt=prompt,
        seed=seed,
        scheduler=run.model.components["scheduler"].class_name,
        model=run.model_name,
        model_hashes=run.model_hashes(),
        adapters={lora.name: lora.scale for lora in run.loras},
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
    content = run.store.read(ref)
    if (scope := current_scope()) is not None:
        path = scope.save(content, save_as, full, embed=embed_settings)
    else:
        path = _save(content, save_as, folder, full if embed_settings else None, prompt, seed)
    run.keep_item(path, ref, full, save_as.media_type)
    run.display.saved(str(path))
    return {"path": str(path), "prompt": prompt, "seed": seed, "digest": ref.digest}


def list_files(files: Sequence[SavedFile], noun: str) -> None:
    """Show a run's files on the run's page, as a gallery and a table; no server is no error.

    Args:
        noun: What they are: `pictures` or `videos`.
    """
    if current_scope() is not None:
        return  # a batch has a table of its own
    table = [
        {
            "file": each.path,
            "prompt": escape_for_terminal(each.prompt, limit=200),
            "seed": str(each.seed),  # a browser would round a number of twenty digits
            "artifact": each.digest[:16],
        }
        for each in files[:MOST_LISTED]
    ]
    show_gallery(
        [
            Shown(
                digest=each.digest,
                prompt=each.prompt,
                label=f"seed {each.seed}",
                is_clip=each.path.endswith(".mp4"),
            )
            for each in files
        ],
        noun,
    )
    description = f"{len(files)} {noun}"
    if len(files) > len(table):
        description += f", the first {len(table)} are listed"
    try:
        create_table_artifact(table, key=noun, description=description)
    except Exception as error:  # whatever the server says, the files are there
        logger.warning("the run's page shows no table of its %s: %r", noun, error)


@task(name="save", task_run_name="save-{seed}", persist_result=False, cache_policy=NO_CACHE)
def _save(
    content: bytes,
    save_as: SaveAs,
    folder: Path,
    settings: Settings | None,
    prompt: str,
    seed: int,
) -> Path:
    file = finished(content, save_as, settings)
    return write_file(file, folder, save_as.extension, prompt=prompt, seed=seed)

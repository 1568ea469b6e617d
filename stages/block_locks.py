"""Locks: the code of custom blocks that a user has reviewed, kept by its own digest.

A lock lies in the exeunt home, `blocks/DIGEST.json`, and holds the reviewed text itself. What
runs is that text, so that nothing that happens to the folder it came from, before, during or
after a run, can change it. A folder is only compared. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from stages.block_outline import outline_entry, outline_file
from stages.block_sources import BlockSources, parse_block_sources, read_block_sources
from stages.errors import ModelError, RequestError
from stages.file_writes import replace_whole

FOLDER = "blocks"
WHOLE = "pipeline"
"""What stands for all blocks of a pipeline where one of them could be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """One reviewed state of a folder.

    Attributes:
        directory: Where the folder lay.
        reviewed_at: Seconds since 1970.
    """

    digest: str
    directory: str
    reviewed_at: float
    sources: BlockSources


def check_block_sources(sources: BlockSources) -> None:
    """Refuse code that could not run, or would run what is not in its folder.

    Raises:
        ModelError: See `outline_file` and `outline_entry`.
    """
    for path in sources.modules.values():
        outline_file(sources, path)
    outline_entry(sources)


def write_lock(home: Path, directory: Path, sources: BlockSources) -> Path:
    """Keep reviewed sources; the same ones twice are one lock.

    Raises:
        ModelError: The sources cannot run.
        ArtifactError: The home cannot be written.
    """
    check_block_sources(sources)
    folder = home / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{sources.digest}.json"
    replace_whole(path, sources.content)
    about = {"directory": os.fspath(directory.resolve()), "reviewed_at": time.time()}
    replace_whole(_about(path), json.dumps(about).encode("ascii"))
    return path


def read_lock(home: Path, digest: str) -> BlockSources:
    """The reviewed sources of a digest.

    Raises:
        ModelError: There is no such lock here, or it no longer holds what its name says.
    """
    path = home / FOLDER / f"{digest}.json"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"blocks {digest[:16]} were not reviewed here: no {path}; run `exeunt blocks review "
            "DIR` on this machine"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelError(f"lock {path} was changed after the review; review the blocks again")
    return parse_block_sources(content, str(path))


def reviews(home: Path) -> list[Review]:
    """All locks of a home that are whole, the oldest first."""
    found = []
    for path in (home / FOLDER).glob("*.about"):
        digest = path.name.removesuffix(".about")
        try:
            about = json.loads(path.read_bytes())
            when, where = float(about["reviewed_at"]), str(about["directory"])
            sources = read_lock(home, digest)
        except (ModelError, OSError, ValueError, KeyError, TypeError):
            continue
        found.append(Review(digest=digest, directory=where, reviewed_at=when, sources=sources))
    return sorted(found, key=lambda review: review.reviewed_at)


def last_review(home: Path, directory: Path) -> Review | None:
    """What was reviewed of a folder last."""
    where = os.fspath(directory.resolve())
    found = [review for review in reviews(home) if review.directory == where]
    return found[-1] if found else None


def forget(home: Path, digest: str) -> None:
    """Remove a lock: its blocks do not run again before another review.

    Raises:
        ModelError: There is none of this digest.
    """
    read_lock(home, digest)
    path = home / FOLDER / f"{digest}.json"
    path.unlink()
    _about(path).unlink(missing_ok=True)


def require_reviewed(home: Path, directory: Path) -> BlockSources:
    """The code of a folder, if it is to the byte what was reviewed.

    Raises:
        ModelError: It was never reviewed, or differs; then with what differs.
    """
    sources = read_block_sources(directory)
    if (home / FOLDER / f"{sources.digest}.json").is_file():
        return read_lock(home, sources.digest)
    remedy = f"read it, then run `exeunt blocks review {directory}`"
    last = last_review(home, directory)
    if last is None:
        raise ModelError(f"the code in {directory} was never reviewed; {remedy}")
    differences = ", ".join(sources.differences(last.sources)) or "the class of its blocks differs"
    raise ModelError(
        f"the code in {directory} is not what was reviewed: {differences}; nothing of it was run; "
        f"{remedy}"
    )


def chosen_blocks(home: Path, texts: list[str]) -> dict[str, str]:
    """The digest of reviewed blocks by the name of the block that they stand in for.

    Args:
        texts: Each a folder, for all blocks of the pipeline, or `NAME=FOLDER`.

    Raises:
        RequestError: A name is given twice, or no folder.
        ModelError: See `require_reviewed`.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        name, folder = (name, folder) if equals and "/" not in name else (WHOLE, text)
        if not folder:
            raise RequestError(f"blocks is {text!r}, expected a folder, or NAME=FOLDER")
        if name in found:
            raise RequestError(f"blocks for {name} are given twice; give one folder")
        found[name] = require_reviewed(home, Path(folder).expanduser()).digest
    return found


def _about(path: Path) -> Path:
    return path.with_suffix(".about")

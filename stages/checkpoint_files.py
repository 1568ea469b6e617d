"""A request's checkpoints in the store: whole files, named by step and by what they hold.

They lie at `checkpoints/<request digest>-<step>-<sha256 of the content>.safetensors`. Like
records they are put in place by one rename; unlike objects nothing refers to them, and they are
gone as soon as their request has a result. This module loads no torch.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from stages.errors import ArtifactError
from stages.file_writes import temp_owner
from stages.local_files import Entry

if TYPE_CHECKING:
    from stages.artifact_gc import Files

FOLDER = "checkpoints"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9]{6})-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One stored checkpoint, as its name tells.

    Attributes:
        key: Relative to the store.
        request_digest: The request that it belongs to.
        step: Finished steps, from 1.
        digest: sha256 of its content.
        size: Bytes.
        modified_s: When it was written, in seconds since 1970.
    """

    key: str
    request_digest: str
    step: int
    digest: str
    size: int
    modified_s: float


def parse_entry(entry: Entry) -> Checkpoint | None:
    """The checkpoint that a stored file is; None for any other file."""
    match = _NAME.fullmatch(PurePosixPath(entry.key).name)
    if match is None:
        return None
    return Checkpoint(
        key=entry.key,
        request_digest=match[1],
        step=int(match[2]),
        digest=match[3],
        size=entry.size,
        modified_s=entry.modified_s,
    )


def list_checkpoints(files: Files) -> list[Checkpoint]:
    """Every checkpoint of a store, in the order of their names.

    Raises:
        ArtifactError: The store cannot be listed.
    """
    found = [parse_entry(entry) for entry in files.entries(FOLDER)]
    return [each for each in found if each is not None]


class CheckpointFiles:
    """The checkpoints of one request in one store."""

    def __init__(self, files: Files, request_digest: str) -> None:
        self._files = files
        self._request_digest = request_digest

    def newest_first(self) -> list[Checkpoint]:
        """What is stored; of the most steps first.

        Raises:
            ArtifactError: The store cannot be listed.
        """
        found = list_checkpoints(self._files)
        own = [each for each in found if each.request_digest == self._request_digest]
        return sorted(own, key=lambda each: (-each.step, -each.modified_s, each.key))

    def write(self, step: int, data: bytes) -> Checkpoint:
        """Store the bytes of one checkpoint; it appears whole or not at all.

        Raises:
            ArtifactError: No space, no permission, or another failure to write.
        """
        digest = hashlib.sha256(data).hexdigest()
        key = f"{FOLDER}/{self._request_digest}-{step:06d}-{digest}.safetensors"
        self._files.write_record(key, data)
        entry = Entry(key=key, size=len(data), modified_s=0.0)
        made = parse_entry(entry)
        assert made is not None
        return made

    def read(self, checkpoint: Checkpoint) -> bytes:
        """A checkpoint's bytes; exactly those that are returned were checked.

        Raises:
            ArtifactError: It is gone, cut off, or not what its name says.
        """
        data = self._files.read_record(checkpoint.key, checkpoint.size)
        if data is None:
            raise ArtifactError("it is gone, or cannot be read")
        if (digest := hashlib.sha256(data).hexdigest()) != checkpoint.digest:
            raise ArtifactError(
                f"it is damaged: {len(data)} bytes with sha256 {digest[:16]}, expected "
                f"{checkpoint.digest[:16]}"
            )
        return data

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove one checkpoint if it is there.

        Raises:
            ArtifactError: It cannot be removed.
        """
        self._files.remove(checkpoint.key)

    def clear(self) -> None:
        """Remove all checkpoints of this request, and what a killed writer left of one.

        Raises:
            ArtifactError: One cannot be removed; the others are gone.
        """
        failures: list[ArtifactError] = []
        for entry in list(self._files.entries(FOLDER)):
            name = PurePosixPath(entry.key).name
            if not name.startswith(f"{self._request_digest}-"):
                continue
            owner = temp_owner(name)
            if owner is not None and (not owner.is_this_host or owner.is_alive):
                continue
            try:
                self._files.remove(entry.key)
            except ArtifactError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def remove_quietly(files: CheckpointFiles, checkpoint: Checkpoint) -> None:
    """Remove a checkpoint that is of no use any more; one that stays does no harm."""
    with suppress(ArtifactError):
        files.remove(checkpoint)

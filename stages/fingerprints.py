"""The sha256 of large files, computed once per change and remembered beside the artifacts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from stages.errors import ArtifactError, ModelError
from stages.file_writes import is_settled, replace_whole, stat_key

log = logging.getLogger(__name__)

MEMORY_FORMAT = 1

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the file's size, in bytes."""


def file_sha256(
    path: Path, home_dir: Path, *, verify: bool = False, progress: Progress | None = None
) -> str:
    """A file's sha256, as 64 hex digits, from memory if the file has not changed since.

    What is remembered lies in `home_dir/fingerprints`; if that cannot be written, the file is
    read again next time. A file counts as changed when its size, time of modification, inode,
    time of status change or device differ from what was remembered, in either direction.

    Args:
        verify: Read the file even if it seems not to have changed.
        progress: Called for each MiB or so, and only if the file is read.

    Raises:
        ModelError: The file cannot be read, or changed while it was read.

    Blocks on reading the whole file, unless it is remembered.
    """
    try:
        real = path.resolve(strict=True)
        memory = home_dir / "fingerprints" / f"{_path_key(real)}.json"
        status = real.stat()
        if not verify and (known := _recall(memory, status)) is not None:
            return known
        digest, status = _hash(real, progress)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if is_settled(status):
        _remember(memory, real, status, digest)
    return digest


class _Counting:
    """A file whose reads are reported: `hashlib.file_digest` takes it for the file itself."""

    def __init__(self, fd: int, size: int, progress: Progress) -> None:
        self._fd, self._size, self._progress = fd, size, progress
        self._done = self._reported = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:
        num_read = os.readv(self._fd, [buffer])
        self._done += num_read
        if self._done - self._reported >= 2**20 or num_read == 0:
            self._reported = self._done
            self._progress(self._done, self._size)
        return num_read


def _hash(path: Path, progress: Progress | None) -> tuple[str, os.stat_result]:
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        source = _Counting(file.fileno(), before.st_size, progress) if progress else file
        digest = hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
        after = os.fstat(file.fileno())
    if stat_key(before) != stat_key(after):
        raise ModelError(f"file changed while it was read: {path}; wait until it is complete")
    return digest, after


def _path_key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


def _recall(memory: Path, status: os.stat_result) -> str | None:
    try:
        document = json.loads(memory.read_bytes())
        if document["format"] == MEMORY_FORMAT and document["stat"] == [*stat_key(status)]:
            digest = document["sha256"]
            return digest if isinstance(digest, str) and len(digest) == 64 else None
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, unreadable or of another format: the file itself has the answer
    return None


def _remember(memory: Path, path: Path, status: os.stat_result, digest: str) -> None:
    document = {
        "format": MEMORY_FORMAT,
        "path": os.fsencode(path).decode("utf-8", "backslashreplace"),
        "stat": [*stat_key(status)],
        "sha256": digest,
    }
    try:
        replace_whole(memory, json.dumps(document).encode("ascii"))
    except ArtifactError as error:
        log.warning("the fingerprint of %s is not remembered: %s", path, error)

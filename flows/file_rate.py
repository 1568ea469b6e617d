"""How fast files of a folder can be read, once from the disk and once from memory."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 512 << 20
_LEAST_BYTES = 8 << 20  # a smaller file says little about a rate
_OWN_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_MOST_FILES = 10_000  # looked at, in search of a large one


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRate:
    """Rates of one file, in bytes per second.

    Attributes:
        path: The file that was read; in a folder without a large one, a temporary one.
        nbytes: How much of it was read.
        first_bytes_per_s: After the kernel was asked to forget it: of the disk, where it did.
        again_bytes_per_s: Directly afterwards: of the page cache.
    """

    path: str
    nbytes: int
    first_bytes_per_s: float
    again_bytes_per_s: float


def measure_file_rate(folder: Path) -> FileRate:
    """Read up to 512 MiB of the largest file under a folder, twice.

    Raises:
        OSError: The folder cannot be read; or it holds no large file and cannot be written.
    """
    with _large_file(folder) as path, path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes, first_s = _read(file.fileno())
        _, again_s = _read(file.fileno())
    return FileRate(
        path=str(path),
        nbytes=nbytes,
        first_bytes_per_s=nbytes / first_s,
        again_bytes_per_s=nbytes / again_s,
    )


def _read(descriptor: int) -> tuple[int, float]:
    """Bytes read from the start, and the seconds that took."""
    buffer = bytearray(_CHUNK_BYTES)
    nbytes, start = 0, time.perf_counter()
    while nbytes < _MOST_BYTES:
        count = os.preadv(descriptor, [buffer], nbytes)
        if not count:
            break
        nbytes += count
    return nbytes, max(time.perf_counter() - start, 1e-9)


@contextmanager
def _large_file(folder: Path) -> Iterator[Path]:
    """The largest file below a folder; a temporary one where none is large."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    largest = max(_files(folder), default=(0, folder))
    if largest[0] >= _LEAST_BYTES:
        yield largest[1]
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".exeunt-read-") as file:
        for _ in range(_OWN_BYTES // _CHUNK_BYTES):
            file.write(os.urandom(_CHUNK_BYTES))
        file.flush()
        os.fsync(file.fileno())  # pages that are not written yet cannot be forgotten
        yield Path(file.name)


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    num_seen = 0
    for root, _, names in os.walk(folder):
        for name in names:
            num_seen += 1
            if num_seen > _MOST_FILES:
                return
            path = Path(root) / name
            try:
                if path.is_file() and os.access(path, os.R_OK):
                    # A hole is read without a disk: what counts is what is there.
                    status = path.stat()
                    yield min(status.st_size, status.st_blocks * 512), path
            except OSError:
                continue

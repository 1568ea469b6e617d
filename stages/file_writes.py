"""Files written whole: under a temporary name of one's own, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stages.errors import ArtifactError

SETTLE_S = 0.1
"""A file younger than this may change once more within one tick of its clock, unseen."""

_HOST = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:40] or "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class TempOwner:
    """Who writes a temporary file, read from its name."""

    host: str
    pid: int

    @property
    def is_this_host(self) -> bool:
        return self.host == _HOST

    @property
    def is_alive(self) -> bool:
        """Whether a process of that number runs here; it may be another one by now."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True


def temp_name(name: str) -> str:
    """A name nobody else uses, which tells whose file it is while it is being written."""
    return f"{name}.tmp-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"


def temp_owner(name: str) -> TempOwner | None:
    """Whose temporary file this is; None for any other file."""
    match = re.search(r"\.tmp-(.+)-([0-9]+)-[0-9a-f]{8}$", name)
    return TempOwner(host=match[1], pid=int(match[2])) if match else None


def stat_key(status: os.stat_result) -> tuple[int, ...]:
    """Differs whenever a file's content may have changed; compare with `!=`, never with `<`."""
    return (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
        status.st_dev,
    )


def is_settled(status: os.stat_result) -> bool:
    """Whether any later change must show in the file's times."""
    return status.st_ctime < time.time() - SETTLE_S


def mib(nbytes: int) -> str:
    """A size for people, with the exact figure."""
    return f"{nbytes / 2**20:.1f} MiB ({nbytes} bytes)"


def raise_write_error(error: OSError, directory: Path, need: int) -> NoReturn:
    """Say why `need` bytes could not be written into `directory`.

    Raises:
        ArtifactError: Always.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(directory).free
        why = "quota exceeded" if error.errno == errno.EDQUOT else "no space"
        if error.errno == errno.ENOSPC and free > need:
            why = f"no space ({os.statvfs(directory).f_favail} file entries free)"
        raise ArtifactError(
            f"{why}: need {mib(need)}, free {mib(free)} in {directory}; "
            "free some space or choose another store"
        ) from error
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise ArtifactError(_not_writable(directory, error)) from error
    raise ArtifactError(f"cannot write {need} bytes into {directory}: {error}") from error


def _not_writable(directory: Path, error: OSError) -> str:
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    status = place.stat()
    return (
        f"not writable for uid {os.geteuid()}: {place} "
        f"(owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}): "
        f"{error.strerror}; change its owner or mode, or choose another folder"
    )


def check_folder_writable(directory: Path) -> None:
    """Create a folder if need be, and a file in it for a moment.

    Raises:
        ArtifactError: It cannot be written; with path, uid, owner and mode.
    """
    probe = directory / temp_name("probe")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise ArtifactError(f"not a folder: {directory}: {error.strerror}") from error
    except OSError as error:
        raise_write_error(error, directory, 0)


class Stream:
    """A file being written: hashes what passes, and writes every byte or fails."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._sha256 = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Write all of `data`, which is contiguous, and return its size in bytes."""
        view = memoryview(data).cast("B")
        self._sha256.update(view)
        done = 0
        try:
            while done < view.nbytes:  # one call writes 2 GiB at most, and less on a full disk
                done += os.write(self._fd, view[done:])
        except OSError as error:
            self.failure = error
            raise
        finally:
            self.size += done
        return view.nbytes

    def flush(self) -> None:
        """Force what was written to the disk; a delayed write fails here at the latest."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            self.failure = error
            raise

    def hexdigest(self) -> str:
        """sha256 of what was written so far."""
        return self._sha256.hexdigest()


@contextmanager
def new_file(path: Path, need: int = 0, *, folder_fd: int | None = None) -> Iterator[Stream]:
    """Create a file and flush it to disk at the end; on any failure nothing of it remains.

    Args:
        path: A name that does not exist, in a folder that does.
        need: Expected size in bytes, 0 if unknown; compared with the free space first.
        folder_fd: A handle on the folder of `path`, to be used in place of its name.

    Raises:
        ArtifactError: No space, no permission, or another failure to write. Errors that the
            caller's own code raises meanwhile pass through.
    """
    name = path if folder_fd is None else path.name
    try:
        usage = shutil.disk_usage(path.parent if folder_fd is None else folder_fd)
        if usage.total and need > usage.free:  # some network disks report 0 of 0 bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Not the tempfile module: its mode 0600 would override the user's umask.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=folder_fd)
    except OSError as error:
        raise_write_error(error, path.parent, need)
    stream = Stream(fd)
    try:
        try:
            yield stream
            stream.flush()
        finally:
            os.close(fd)
    except BaseException as error:
        with suppress(FileNotFoundError):  # first: the message tells the space without it
            os.unlink(name, dir_fd=folder_fd)
        if isinstance(error, OSError) and error is stream.failure:
            raise_write_error(error, path.parent, max(need, stream.size))
        raise


def replace_whole(path: Path, data: bytes) -> None:
    """Write a small file whole, in place of an older one; readers see the old or the new.

    Raises:
        ArtifactError: No space, no permission, or another failure to write.
    """
    temp = path.with_name(temp_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise_write_error(error, path.parent, len(data))
    with new_file(temp, len(data)) as stream:
        stream.write(data)
    try:
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise_write_error(error, path.parent, len(data))
    flush_folder(path.parent)


def flush_file(path: Path) -> None:
    """Force a finished file to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_folder(path: Path) -> None:
    """Force a rename to the disk; some network disks refuse, and flush on their own."""
    with suppress(OSError):
        flush_file(path)

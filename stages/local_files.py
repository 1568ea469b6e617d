"""A store's files on a local disk: each appears whole under its name, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stages.contracts import ArtifactRef
from stages.errors import ArtifactError, ArtifactMissing
from stages.file_writes import (
    check_folder_writable,
    flush_folder,
    is_settled,
    raise_write_error,
    replace_whole,
    stat_key,
    temp_name,
)

log = logging.getLogger(__name__)

TOUCH_AFTER_S = 1800.0
"""An object in use is touched this often: well within the grace hour of garbage collection,
and seldom enough that other processes can go on trusting the checksum they computed."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_intact: dict[str, tuple[str, tuple[int, ...]]] = {}  # path -> digest and stat when last hashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored file.

    Attributes:
        key: Relative to the store, with `/` between parts.
        size: Bytes.
        modified_s: Last change or use, in seconds since 1970.
    """

    key: str
    size: int
    modified_s: float


def object_key(digest: str) -> str:
    """Where an object lies in a store."""
    return f"objects/sha256/{digest[:2]}/{digest}"


class LocalFiles:
    """Objects and records below one folder, which is made on the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def check_writable(self) -> None:
        """Raise ArtifactError unless a file can be made in the store."""
        check_folder_writable(self.root / "objects" / "sha256")

    def temp_path(self, key: str = "objects/sha256/new") -> Path:
        """A new name beside `key` for a file that becomes an object when it is complete."""
        path = self.root / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise_write_error(error, path.parent, 0)
        return path.with_name(temp_name(path.name))

    def publish(self, temp: Path, digest: str) -> None:
        """Turn a complete, flushed file into the object `digest`; `temp` is gone afterwards.

        An intact object that is already there stays, and its copy is dropped.
        """
        target = self.root / object_key(digest)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with self.shared():
                self._publish(temp, target, digest)
            flush_folder(target.parent)
        except OSError as error:
            temp.unlink(missing_ok=True)
            raise_write_error(error, target.parent, 0)

    def _publish(self, temp: Path, target: Path, digest: str) -> None:
        size = temp.stat().st_size
        try:
            os.link(temp, target)
        except FileExistsError:
            if self.adopt(digest, size):
                temp.unlink()
                return
            temp.replace(target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            temp.replace(target)
        else:
            temp.unlink()
        _remember(target, digest)

    def adopt(self, digest: str, size: int, /) -> bool:
        """Whether an intact object is there already; if so, it counts as used now."""
        ref = ArtifactRef(digest=digest, size=size)
        with self.shared():
            try:
                self.check(ref)
            except ArtifactMissing:
                return False
            self.keep(digest)
        return True

    def keep(self, digest: str) -> None:
        """Note that an object is in use, so that garbage collection takes it for a young one."""
        _touch_object(self.root / object_key(digest), digest)

    def size(self, digest: str) -> int | None:
        """Bytes of an object, None if it is absent."""
        try:
            return (self.root / object_key(digest)).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def check(self, ref: ArtifactRef, *, again: bool = False) -> Path:
        """The object's file, with its size checked, and its sha256 once per change.

        Args:
            again: Compute the sha256 even if this process did so before.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        path = self.root / object_key(ref.digest)
        try:
            status = path.stat()
            if status.st_size != ref.size:
                self._set_aside(path, status, ref, f"has {status.st_size} bytes")
            if again or _intact.get(str(path)) != (ref.digest, stat_key(status)):
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != ref.digest:
                    self._set_aside(path, status, ref, f"has sha256 {digest}")
                _remember(path, ref.digest, status)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise missing(ref, self.url) from error
        except OSError as error:
            raise ArtifactError(f"cannot read artifact {ref.digest}: {path}: {error}") from error
        return path

    def read(self, ref: ArtifactRef) -> bytes:
        """The object's bytes; exactly those that are returned were checked.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        path = self.root / object_key(ref.digest)
        try:
            status = path.stat()
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise missing(ref, self.url) from error
        except OSError as error:
            raise ArtifactError(f"cannot read artifact {ref.digest}: {path}: {error}") from error
        if len(data) != ref.size:
            self._set_aside(path, status, ref, f"has {len(data)} bytes")
        if (digest := hashlib.sha256(data).hexdigest()) != ref.digest:
            self._set_aside(path, status, ref, f"has sha256 {digest}")
        _remember(path, ref.digest, status)
        return data

    def _set_aside(
        self, path: Path, status: os.stat_result, ref: ArtifactRef, found: str
    ) -> NoReturn:
        """Move a damaged object out of the way, so that it is made again."""
        aside = path.with_name(f"{path.name}.bad")
        try:
            path.replace(aside)
            # Between our reading and the move, another process may have put an intact object
            # here. It goes back, unless yet another one is there already.
            if aside.stat().st_ino != status.st_ino:
                with suppress(FileExistsError):
                    os.link(aside, path)
                aside.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("damaged artifact %s cannot be moved to %s: %s", path, aside, error)
        log.warning("artifact %s is damaged: %s %s, expected %s bytes", ref.digest, path, found,
                    ref.size)  # fmt: skip
        raise ArtifactMissing(
            f"artifact {ref.digest} is damaged: {path} {found}, expected {ref.size} bytes with "
            "that sha256; it was set aside and has to be made again"
        )

    def read_record(self, key: str, limit_nbytes: int) -> bytes | None:
        """A record's bytes, None if it is absent; at most `limit_nbytes + 1` of them."""
        try:
            with (self.root / key).open("rb") as file:
                return file.read(limit_nbytes + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            log.warning("record %s cannot be read: %s", self.root / key, error)
            return None

    def write_record(self, key: str, data: bytes) -> None:
        """Write a record whole, in place of an older one."""
        replace_whole(self.root / key, data)

    def touch(self, key: str) -> None:
        """Note that a record was used now; a store that cannot be written stays as it is."""
        with suppress(OSError):
            os.utime(self.root / key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every file below `objects` or `records`, in the order of their keys."""
        top = self.root / prefix
        for folder, folders, names in os.walk(top):
            folders.sort()
            for name in sorted(names):
                path = Path(folder) / name
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    key = path.relative_to(self.root).as_posix()
                    yield Entry(key=key, size=status.st_size, modified_s=status.st_mtime)

    def remove(self, key: str) -> None:
        """Remove a file if it is there."""
        try:
            (self.root / key).unlink(missing_ok=True)
        except OSError as error:
            raise ArtifactError(f"cannot remove {self.root / key}: {error}") from error

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold off garbage collection: what is made or adopted meanwhile is seen as such."""
        with self._lock(fcntl.LOCK_SH):
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold off writers while unused files are removed."""
        with self._lock(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        fd = None
        try:
            fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, kind)
        except OSError as error:
            # A store that we may only read, or a disk without locks: the grace hour remains.
            log.debug("no lock on %s: %s", self.root, error)
        try:
            yield
        finally:
            if fd is not None:
                os.close(fd)


def missing(ref: ArtifactRef, url: str) -> ArtifactMissing:
    """The error for an absent object."""
    return ArtifactMissing(
        f"artifact {ref.digest} ({ref.size} bytes) is not in {url}; it has to be made again"
    )


def _remember(path: Path, digest: str, hashed: os.stat_result | None = None) -> None:
    """Skip the next checksum of a file that has not changed since `hashed` was taken."""
    with suppress(OSError):
        status = path.stat()
        if is_settled(status) and (hashed is None or stat_key(hashed) == stat_key(status)):
            _intact[str(path)] = (digest, stat_key(status))


def _touch_object(path: Path, digest: str) -> None:
    """Note that an object is in use; keep our own checksum valid across the change of time."""
    with suppress(OSError):
        before = path.stat()
        if before.st_mtime > time.time() - TOUCH_AFTER_S:
            return
        was_intact = _intact.get(str(path)) == (digest, stat_key(before))
        os.utime(path)
        after = path.stat()
        if was_intact and (before.st_ino, before.st_size) == (after.st_ino, after.st_size):
            _intact[str(path)] = (digest, stat_key(after))

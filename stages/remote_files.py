"""A store's files behind an fsspec URL, with a checked copy of each object on the local disk."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import fsspec

from stages.contracts import ArtifactRef
from stages.errors import ArtifactError, ArtifactMissing
from stages.file_writes import new_file, temp_name
from stages.local_files import Entry, LocalFiles, missing, object_key

log = logging.getLogger(__name__)

WHOLE_PUTS = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"}
"""Protocols whose objects appear only when complete, so that no rename is needed."""

TOUCH_AFTER_S = 1800.0
"""Object stores keep no time of use: a record is written anew, at most this often."""


class RemoteFiles:
    """Objects and records behind an fsspec filesystem.

    Reading an object brings a copy into `cache`, whose checksum is computed there. The
    filesystem's own size is compared each time. There are no locks: garbage collection relies
    on its grace hour alone.
    """

    def __init__(self, url: str, cache: LocalFiles, filesystem: Any = None) -> None:
        self.url = redact(url)
        self.cache = cache
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ArtifactError(f"cannot open the artifact store {self.url}: {error}") from error
        self._fs = filesystem or self._fs
        self._root = root.rstrip("/")
        protocols = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)

    def check_writable(self) -> None:
        """Raise ArtifactError unless an object can be made in the store and in the cache."""
        self.cache.check_writable()
        key = temp_name("objects/sha256/probe")
        self._write(key, b"probe")
        self.remove(key)

    def temp_path(self) -> Path:
        """A new local name for a file that becomes an object when it is complete."""
        return self.cache.temp_path()

    def publish(self, temp: Path, digest: str) -> None:
        """Turn a complete, flushed local file into the object `digest`; `temp` is gone afterwards.

        It is sent even if an object of that name exists: finding out whether that one is
        intact would cost as much, and this mends it.
        """
        try:
            self._write(object_key(digest), temp)
        except ArtifactError:
            temp.unlink(missing_ok=True)
            raise
        self.cache.publish(temp, digest)

    def adopt(self, _digest: str, _size: int, /) -> bool:
        """Always False: see `publish`."""
        return False

    def keep(self, digest: str) -> None:
        """Note that the local copy is in use; the object lives as long as its records."""
        self.cache.keep(digest)

    def size(self, digest: str) -> int | None:
        """Bytes of an object, None if it is absent."""
        info = self._info(object_key(digest))
        return None if info is None else int(info["size"])

    def check(self, ref: ArtifactRef, *, again: bool = False) -> Path:
        """A local copy of the object, with its size checked, and its sha256 once per change.

        Args:
            again: Fetch the object and compute its sha256 even if there is a local copy.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        size = self.size(ref.digest)
        if size is None:
            raise missing(ref, self.url)
        if size != ref.size:
            self._set_aside(ref, f"has {size} bytes")
        if not again:
            with suppress(ArtifactMissing):
                return self.cache.check(ref)
        return self._fetch(ref)

    def _fetch(self, ref: ArtifactRef) -> Path:
        temp = self.cache.temp_path(object_key(ref.digest))
        with new_file(temp, ref.size) as stream:
            try:
                with self._fs.open(self._path(object_key(ref.digest)), "rb") as file:
                    while chunk := file.read(8 * 2**20):
                        stream.write(chunk)
            except FileNotFoundError as error:
                raise missing(ref, self.url) from error
            digest = stream.hexdigest()
        if digest != ref.digest:
            temp.unlink()
            self._set_aside(ref, f"has sha256 {digest}")
        self.cache.publish(temp, digest)
        return self.cache.check(ref)

    def read(self, ref: ArtifactRef) -> bytes:
        """The object's bytes, checked.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        self.check(ref)
        return self.cache.read(ref)

    def _set_aside(self, ref: ArtifactRef, found: str) -> NoReturn:
        key = object_key(ref.digest)
        with self._errors(f"set aside {key}"), suppress(FileNotFoundError):
            self._fs.mv(self._path(key), self._path(f"{key}.bad"))
        log.warning("artifact %s is damaged: it %s, expected %s bytes", ref.digest, found, ref.size)
        raise ArtifactMissing(
            f"artifact {ref.digest} in {self.url} is damaged: it {found}, expected {ref.size} "
            "bytes with that sha256; it was set aside and has to be made again"
        )

    def read_record(self, key: str, limit_nbytes: int) -> bytes | None:
        """A record's bytes, None if it is absent; at most `limit_nbytes + 1` of them."""
        with self._errors(f"read {key}"):
            try:
                with self._fs.open(self._path(key), "rb") as file:
                    return bytes(file.read(limit_nbytes + 1))
            except (FileNotFoundError, IsADirectoryError):
                return None

    def write_record(self, key: str, data: bytes) -> None:
        """Write a record whole, in place of an older one."""
        self._write(key, data)

    def touch(self, key: str) -> None:
        """Note that a record was used now; a store that cannot be written stays as it is."""
        info = self._info(key)
        modified_s = self._modified_s(info) if info else None
        if modified_s is None or modified_s > datetime.now(UTC).timestamp() - TOUCH_AFTER_S:
            return
        data = self.read_record(key, int(info["size"])) if info else None
        if data is not None:
            with suppress(ArtifactError):
                self._write(key, data)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every file below `objects` or `records`, in the order of their keys."""
        top = self._path(prefix)
        with self._errors(f"list {prefix}"):
            self._fs.invalidate_cache()
            found = self._fs.find(top, detail=True)
        for path in sorted(found):
            key = prefix + path[path.rindex(top) + len(top) :]
            modified_s = self._modified_s(found[path])
            if modified_s is None:  # unknown age: too young to be collected
                modified_s = datetime.now(UTC).timestamp()
            yield Entry(key=key, size=int(found[path]["size"]), modified_s=modified_s)

    def remove(self, key: str) -> None:
        """Remove a file if it is there."""
        with self._errors(f"remove {key}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """No lock: see the class."""
        yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No lock: see the class."""
        yield

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _info(self, key: str) -> dict[str, Any] | None:
        with self._errors(f"look for {key}"):
            try:
                self._fs.invalidate_cache(self._fs._parent(self._path(key)))
                info: dict[str, Any] = self._fs.info(self._path(key))
            except FileNotFoundError:
                return None
        return info if info.get("type") != "directory" else None

    def _modified_s(self, info: dict[str, Any]) -> float | None:
        """Seconds since 1970, under the name that this filesystem gives to it."""
        for name in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
            value = info.get(name)
            if isinstance(value, str):
                with suppress(ValueError):
                    value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
            if isinstance(value, int | float):
                return float(value)
        return None

    def _write(self, key: str, content: bytes | Path) -> None:
        """Put one whole object: at once where the store allows it, else by a rename."""
        path = self._path(key)
        direct = bool(self._protocols & WHOLE_PUTS)
        target = path if direct else temp_name(path)
        with self._errors(f"write {key}"):
            if not direct:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            try:
                if isinstance(content, Path):
                    self._fs.put_file(str(content), target)
                else:
                    self._fs.pipe_file(target, content)
                if not direct:
                    self._fs.mv(target, path)
            except BaseException:
                if not direct:
                    with suppress(Exception):
                        self._fs.rm_file(target)
                raise

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        """Each filesystem has exceptions of its own, and not all of them are OSErrors."""
        try:
            yield
        except ArtifactError:
            raise
        except Exception as error:
            raise ArtifactError(
                f"cannot {action} in the artifact store {self.url}: "
                f"{type(error).__name__}: {redact(str(error))}"
            ) from error


def redact(text: str) -> str:
    """The text without the user and password parts of URLs."""
    return re.sub(r"(\w+://)[^/\s@]*@", r"\1***@", text)

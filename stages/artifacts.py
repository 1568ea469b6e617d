"""The artifact store: what stages hand to each other, found again by digest or by request.

Objects lie at `objects/sha256/ab/<digest>`, records at `records/<stage>/<request digest>.json`,
both relative to the store, so that it can be moved. This module loads no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pydantic import JsonValue

from stages.artifact_gc import (
    GRACE_S,
    Files,
    GcReport,
    VerifyReport,
    collect,
    object_digest,
    read_records,
    verify_all,
)
from stages.artifact_records import MAX_RECORD_NBYTES, decode_record, encode_record, record_key
from stages.artifact_show import describe
from stages.checkpoint_files import Checkpoint, CheckpointFiles, list_checkpoints
from stages.contracts import ArtifactRef, StageRequest, StageResult
from stages.errors import ArtifactError, ArtifactMissing
from stages.file_writes import Stream, flush_file, new_file, raise_write_error
from stages.local_files import LocalFiles
from stages.remote_files import RemoteFiles

log = logging.getLogger(__name__)

SAFETENSORS = "application/vnd.safetensors"
LOCAL_PREFIXES = ("file://", "local://")


@dataclass(slots=True)
class NewArtifact:
    """An artifact that is being written; `ref` is there when its `with` block has ended."""

    stream: Stream
    media_type: str
    _ref: ArtifactRef | None = field(default=None, init=False)

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data`, which is contiguous, and return its size in bytes."""
        return self.stream.write(data)

    @property
    def ref(self) -> ArtifactRef:
        if self._ref is None:
            raise ArtifactError("an artifact has no reference before it is complete")
        return self._ref


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object of a store.

    Attributes:
        digest: sha256 of its content.
        size: Bytes.
        modified_s: When it was made or last used, in seconds since 1970.
        media_type: As its records say; None if no record refers to it.
        stages: Stages whose records refer to it.
    """

    digest: str
    size: int
    modified_s: float
    media_type: str | None
    stages: tuple[str, ...]


class ArtifactStore:
    """A content-addressed store below a folder or an fsspec URL.

    Opening one touches no disk: folders are made by the first write. Any number of threads
    and processes may use one store at a time. A reader sees an object whole or not at all.

    Args:
        url: A folder, or a URL such as `file:///srv/artifacts`, `memory://x`, `s3://bucket/x`.
        cache_dir: Where local copies of a remote store's objects lie; by default
            `exeunt/artifacts` in `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        ArtifactError: The URL's protocol is unknown, or its library is not installed.
    """

    def __init__(self, url: str | Path, *, cache_dir: str | Path | None = None) -> None:
        text = os.fspath(url)
        for prefix in LOCAL_PREFIXES:
            text = text.removeprefix(prefix)
        self._files: Files
        if "://" in text:
            cache = Path(cache_dir) if cache_dir else _default_cache_dir()
            self._files = RemoteFiles(text, LocalFiles(cache.absolute()))
        elif not text:
            raise ArtifactError("the artifact store has an empty path; name a folder or a URL")
        else:
            self._files = LocalFiles(Path(text).expanduser().absolute())

    @property
    def url(self) -> str:
        """The store's absolute folder, or its URL without user and password."""
        return self._files.url

    def check_writable(self) -> None:
        """Create the store if need be, and a file in it for a moment.

        Raises:
            ArtifactError: It cannot be written; with path, uid, owner and mode.
        """
        self._files.check_writable()

    def put(self, data: bytes, media_type: str = SAFETENSORS) -> ArtifactRef:
        """Store bytes, unless an intact object holds them already.

        Raises:
            ArtifactError: No space, no permission, or another failure to write.
        """
        digest = hashlib.sha256(data).hexdigest()
        if not self._files.adopt(digest, len(data)):
            temp = self.temp_path()
            with new_file(temp, len(data)) as stream:
                stream.write(data)
            self._files.publish(temp, digest)
        return ArtifactRef(digest=digest, size=len(data), media_type=media_type)

    @contextmanager
    def create(self, media_type: str = SAFETENSORS, *, nbytes: int = 0) -> Iterator[NewArtifact]:
        """Write an artifact piece by piece, hashed as it passes; it appears when the block ends.

        An exception inside the block leaves nothing behind.

        Args:
            nbytes: Expected size; compared with the free space before the first byte.

        Raises:
            ArtifactError: No space, no permission, or another failure to write.
        """
        temp = self.temp_path()
        with new_file(temp, nbytes) as stream:
            artifact = NewArtifact(stream, media_type)
            yield artifact
        self._files.publish(temp, stream.hexdigest())
        artifact._ref = ArtifactRef(
            digest=stream.hexdigest(), size=stream.size, media_type=media_type
        )

    def temp_path(self) -> Path:
        """A new name on the store's disk, to be filled and handed to `put_file`.

        A file that is not handed over stays until garbage collection: remove it on failure.
        """
        return self._files.temp_path()

    def put_file(self, path: Path, media_type: str = SAFETENSORS) -> ArtifactRef:
        """Move a complete file into the store; `path` is gone afterwards.

        A file on another disk, or one with a second name through which it could still be
        changed, is copied in pieces instead.

        Raises:
            ArtifactError: The file cannot be read, or not be written into the store.
        """
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not self._is_near(status):
                return self._copy_file(path, media_type)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error}") from error
        try:
            flush_file(path)
        except OSError as error:
            raise_write_error(error, path.parent, status.st_size)
        self._files.publish(path, digest)
        return ArtifactRef(digest=digest, size=status.st_size, media_type=media_type)

    def _is_near(self, status: os.stat_result) -> bool:
        return self.temp_path().parent.stat().st_dev == status.st_dev

    def _copy_file(self, path: Path, media_type: str) -> ArtifactRef:
        with path.open("rb") as file, self.create(media_type, nbytes=path.stat().st_size) as new:
            shutil.copyfileobj(file, new, 8 * 2**20)
        path.unlink()
        return new.ref

    def verify(self, ref: ArtifactRef) -> None:
        """Check that an artifact is present, has its size, and was intact since its last change.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        self._files.check(ref)

    def path(self, ref: ArtifactRef) -> Path:
        """A checked local file with the artifact's bytes: the object itself, or a cached copy.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        return self._files.check(ref)

    def read(self, ref: ArtifactRef) -> bytes:
        """The artifact's bytes; exactly those that are returned were checked.

        Raises:
            ArtifactMissing: It is absent, or was damaged and has been set aside.
        """
        return self._files.read(ref)

    def size(self, digest: str) -> int | None:
        """Bytes of an artifact; None if it is absent."""
        return self._files.size(digest)

    def lookup(self, request: StageRequest) -> StageResult | None:
        """The result of an earlier equal request, if all its artifacts are present and intact.

        It counts as used now. A record that cannot be trusted or understood is a miss with a
        log line, and so is one whose artifacts are gone.
        """
        key = record_key(request.stage, request.digest)
        with self._files.shared():
            data = self._files.read_record(key, MAX_RECORD_NBYTES)
            record = None if data is None else decode_record(data, key)
            if record is None:
                return None
            try:
                for ref in record.result.artifacts.values():
                    self._files.check(ref)
                    self._files.keep(ref.digest)
            except ArtifactMissing as error:
                log.warning("artifact missing, recomputing %s: %s", request.stage, error)
                return None
            self._files.touch(key)
        return record.result

    def record(self, request: StageRequest, result: StageResult) -> None:
        """Remember a result whose artifacts are in this store, in place of an earlier one.

        Raises:
            ArtifactMissing: An artifact is not in this store.
            ArtifactError: The record cannot be written.
        """
        for name, ref in result.artifacts.items():
            if self._files.size(ref.digest) != ref.size:
                raise ArtifactMissing(
                    f"artifact {name!r} ({ref.digest}) of stage {result.stage} is not in {self.url}"
                )
        key = record_key(request.stage, request.digest)
        self._files.write_record(key, encode_record(request, result))

    def checkpoints(self, request: StageRequest) -> CheckpointFiles:
        """The checkpoints of a request that has no result yet."""
        return CheckpointFiles(self._files, request.digest)

    def all_checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of every request, in the order of their names."""
        return list_checkpoints(self._files)

    def ls(self) -> list[StoredObject]:
        """Every object, in the order of their digests."""
        media_types: dict[str, str] = {}
        stages: dict[str, set[str]] = {}
        for _, _, record in read_records(self._files):
            for ref in record.result.artifacts.values() if record else ():
                media_types[ref.digest] = ref.media_type
                stages.setdefault(ref.digest, set()).add(record.result.stage if record else "")
        return [
            StoredObject(
                digest=digest,
                size=entry.size,
                modified_s=entry.modified_s,
                media_type=media_types.get(digest),
                stages=tuple(sorted(stages.get(digest, ()))),
            )
            for entry in self._files.entries("objects")
            if (digest := object_digest(entry.key)) is not None
        ]

    def show(self, digest_prefix: str) -> dict[str, JsonValue]:
        """What an object holds: a safetensors header, a picture's size, or a JSON value.

        Args:
            digest_prefix: The first hex digits of one object's digest.

        Raises:
            ArtifactMissing: No object has that prefix, or it is damaged.
            ArtifactError: More than one object has that prefix.
        """
        found = [item for item in self.ls() if item.digest.startswith(digest_prefix.lower())]
        if not found:
            raise ArtifactMissing(f"no artifact begins with {digest_prefix!r} in {self.url}")
        if len(found) > 1:
            names = ", ".join(item.digest[:12] for item in found[:5])
            raise ArtifactError(
                f"{len(found)} artifacts begin with {digest_prefix!r} in {self.url}: {names}; "
                "give more digits"
            )
        (item,) = found
        path = self.path(ArtifactRef(digest=item.digest, size=item.size))
        return {
            "digest": item.digest,
            "size": item.size,
            "media_type": item.media_type,
            "stages": [*item.stages],
            **describe(path),
        }

    def verify_all(self) -> VerifyReport:
        """Compute every object's sha256 anew; damaged ones are set aside.

        Blocks for as long as it takes to read the whole store.
        """
        return verify_all(self._files)

    def gc(
        self, older_than_s: float, *, dry_run: bool = False, grace_s: float = GRACE_S
    ) -> GcReport:
        """Drop records not used for `older_than_s`, then what no record refers to any more.

        Checkpoints go when they are as old, or when their request has a result.

        Objects, set-aside files and this host's stale temporary files go only when they have
        not been touched for `grace_s`, which must exceed the time between a stage's first
        artifact and its record. Writers on this machine wait meanwhile.

        Raises:
            ArtifactError: A file cannot be removed.
        """
        return collect(self._files, older_than_s=older_than_s, dry_run=dry_run, grace_s=grace_s)


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "exeunt" / "artifacts"


@lru_cache(maxsize=8)
def open_store(url: str) -> ArtifactStore:
    """The store at `url`, one object per process: it remembers what it has checked."""
    return ArtifactStore(url)

"""Removes what a store no longer needs, and checks all that it holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from stages.artifact_records import MAX_RECORD_NBYTES, StageRecord, decode_record, digests_in
from stages.checkpoint_files import FOLDER as CHECKPOINTS
from stages.checkpoint_files import parse_entry
from stages.contracts import ArtifactRef
from stages.errors import ArtifactMissing
from stages.file_writes import temp_owner
from stages.local_files import Entry, LocalFiles
from stages.remote_files import RemoteFiles

log = logging.getLogger(__name__)

GRACE_S = 3600.0
"""An object this young may belong to a stage that has not written its record yet."""

REUSED_PID_S = 86400.0
"""A temporary file unchanged this long is stale even if a process of its number runs."""

Files = LocalFiles | RemoteFiles


@dataclass(slots=True, kw_only=True)
class GcReport:
    """What was removed, or would be.

    Attributes:
        records: Keys of dropped records.
        objects: Digests of removed objects.
        checkpoints: Keys of removed checkpoints.
        leftovers: Keys of removed temporary and set-aside files.
        cached: Digests whose local copy of a remote object was removed.
        foreign_temps: Keys of temporary files of other hosts, which were left alone.
        freed_bytes: Sum of the sizes of all removed files.
        is_dry_run: Nothing was removed.
    """

    records: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    foreign_temps: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    is_dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What a full check of a store found.

    Attributes:
        num_objects: Objects whose sha256 was computed.
        damaged: Digests of objects that were set aside.
        unreadable_records: Keys of records that cannot be used.
        missing: Record keys, each with the digests that it refers to in vain.
    """

    num_objects: int = 0
    damaged: list[str] = field(default_factory=list)
    unreadable_records: list[str] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_intact(self) -> bool:
        return not (self.damaged or self.missing)


def read_records(files: Files) -> Iterator[tuple[Entry, bytes, StageRecord | None]]:
    """Each record file, its bytes, and its content if it can be used."""
    for entry in files.entries("records"):
        if not entry.key.endswith(".json"):
            continue
        data = files.read_record(entry.key, MAX_RECORD_NBYTES)
        if data is not None:
            yield entry, data, decode_record(data, entry.key)


def object_digest(key: str) -> str | None:
    """The digest of an object's key; None for anything else below `objects`."""
    parts = PurePosixPath(key).parts
    if len(parts) != 4 or parts[:2] != ("objects", "sha256"):
        return None
    name = parts[3]
    is_digest = len(name) == 64 and set(name) <= set("0123456789abcdef")
    return name if is_digest and name.startswith(parts[2]) else None


def collect(files: Files, *, older_than_s: float, dry_run: bool, grace_s: float) -> GcReport:
    """Drop records unused for `older_than_s`, then what no record refers to any more."""
    report = GcReport(is_dry_run=dry_run)
    with files.exclusive():
        now = time.time()
        wanted: set[str] = set()
        answered: set[str] = set()  # requests that have a result
        for entry, data, record in read_records(files):
            if entry.modified_s < now - older_than_s:
                report.records.append(entry.key)
                _remove(files, entry, report)
            elif record is None:
                wanted |= digests_in(data)
            else:
                wanted |= {ref.digest for ref in record.result.artifacts.values()}
                answered.add(record.request_digest)
        folders = ("records", "objects", CHECKPOINTS)
        for entry in [each for folder in folders for each in files.entries(folder)]:
            digest, checkpoint = object_digest(entry.key), parse_entry(entry)
            is_old = entry.modified_s < now - grace_s
            if digest is not None:
                if is_old and digest not in wanted:
                    report.objects.append(digest)
                    _remove(files, entry, report)
            elif checkpoint is not None:
                # A young one may be that of a run which computes an answered request anew.
                limit_s = 0.0 if checkpoint.request_digest in answered else older_than_s
                if is_old and entry.modified_s < now - limit_s:
                    report.checkpoints.append(entry.key)
                    _remove(files, entry, report)
            elif _is_leftover(entry, now, grace_s, report):
                report.leftovers.append(entry.key)
                _remove(files, entry, report)
    if isinstance(files, RemoteFiles):
        unused_s = max(older_than_s, grace_s)
        copies = collect(files.cache, older_than_s=unused_s, dry_run=dry_run, grace_s=unused_s)
        report.cached = copies.objects
        report.leftovers += copies.leftovers
        report.freed_bytes += copies.freed_bytes
    return report


def _is_leftover(entry: Entry, now: float, grace_s: float, report: GcReport) -> bool:
    if entry.key.endswith(".bad"):
        return entry.modified_s < now - grace_s
    owner = temp_owner(entry.key)
    if owner is None:
        return False
    if not owner.is_this_host:
        # Whether that process still writes cannot be seen from here.
        report.foreign_temps.append(entry.key)
        return False
    age_s = now - entry.modified_s
    # A dead process may be a live one of another container that shares our host name.
    return age_s > (REUSED_PID_S if owner.is_alive else grace_s)


def _remove(files: Files, entry: Entry, report: GcReport) -> None:
    report.freed_bytes += entry.size
    if not report.is_dry_run:
        log.info("removing %s (%s bytes)", entry.key, entry.size)
        files.remove(entry.key)


def verify_all(files: Files) -> VerifyReport:
    """Compute every object's sha256 anew, and look for what the records refer to.

    Blocks for as long as it takes to read the whole store.
    """
    report = VerifyReport()
    for entry in list(files.entries("objects")):
        digest = object_digest(entry.key)
        if digest is None:
            continue
        report.num_objects += 1
        try:
            files.check(ArtifactRef(digest=digest, size=entry.size), again=True)
        except ArtifactMissing:
            report.damaged.append(digest)
    for entry, _, record in read_records(files):
        if record is None:
            report.unreadable_records.append(entry.key)
            continue
        refs = record.result.artifacts.values()
        if lost := [ref.digest for ref in refs if files.size(ref.digest) != ref.size]:
            report.missing[entry.key] = lost
    return report

"""Garbage collection removes what nobody needs, and never what somebody has just made."""

import os
import threading
import time
from pathlib import Path

import pytest

from stages.artifact_records import record_key
from stages.artifacts import ArtifactStore
from stages.contracts import StageRequest, StageResult
from stages.file_writes import temp_name, temp_owner
from stages.local_files import object_key

DAY_S = 86400.0
LONG_AGO = 1e9  # seconds since 1970


def request(seed: int) -> StageRequest:
    return StageRequest(
        stage="denoise",
        code_version="1",
        family="miniature",
        task="text-to-image",
        dtype="float32",
        seed=seed,
    )


def make(store: ArtifactStore, seed: int, data: bytes) -> str:
    ref = store.put(data)
    store.record(request(seed), StageResult(stage="denoise", artifacts={"latents": ref}))
    return ref.digest


def record_path(store: ArtifactStore, seed: int) -> Path:
    return Path(store.url) / record_key("denoise", request(seed).digest)


def object_path(store: ArtifactStore, digest: str) -> Path:
    return Path(store.url) / object_key(digest)


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_unused_records_go_and_take_their_objects_along(store: ArtifactStore) -> None:
    old, new = make(store, 1, b"old"), make(store, 2, b"new")
    make_old(record_path(store, 1), object_path(store, old), object_path(store, new))

    report = store.gc(older_than_s=DAY_S)

    assert report.records == [record_key("denoise", request(1).digest)]
    assert report.objects == [old]
    assert report.freed_bytes > 3
    assert [item.digest for item in store.ls()] == [new]
    assert store.lookup(request(1)) is None
    assert store.lookup(request(2))


def test_a_dry_run_tells_the_same_and_removes_nothing(store: ArtifactStore) -> None:
    old = make(store, 1, b"old")
    make_old(record_path(store, 1), object_path(store, old))

    forecast = store.gc(older_than_s=DAY_S, dry_run=True)
    assert store.lookup(request(1))

    make_old(record_path(store, 1), object_path(store, old))
    report = store.gc(older_than_s=DAY_S)
    assert (forecast.records, forecast.objects, forecast.freed_bytes) == (
        report.records,
        report.objects,
        report.freed_bytes,
    )
    assert (forecast.is_dry_run, report.is_dry_run) == (True, False)


def test_an_object_that_another_record_refers_to_stays(store: ArtifactStore) -> None:
    shared = make(store, 1, b"shared")
    make(store, 2, b"shared")
    make_old(record_path(store, 1), object_path(store, shared))

    report = store.gc(older_than_s=DAY_S)

    assert (len(report.records), report.objects) == (1, [])
    assert store.lookup(request(2))


def test_an_object_of_a_stage_that_is_still_running_stays(store: ArtifactStore) -> None:
    """It has no record yet, even when everything else is told to go."""
    ref = store.put(b"just made")

    assert store.gc(older_than_s=0).objects == []
    assert store.read(ref) == b"just made"

    make_old(object_path(store, ref.digest))
    assert store.gc(older_than_s=0).objects == [ref.digest]


def test_an_old_object_that_is_put_again_counts_as_just_made(store: ArtifactStore) -> None:
    ref = store.put(b"adopted")
    make_old(object_path(store, ref.digest))

    store.put(b"adopted")

    assert store.gc(older_than_s=0).objects == []


def test_a_lookup_saves_a_record_and_its_objects(store: ArtifactStore) -> None:
    digest = make(store, 1, b"latents")
    make_old(record_path(store, 1), object_path(store, digest))

    assert store.lookup(request(1))

    report = store.gc(older_than_s=DAY_S)
    assert (report.records, report.objects) == ([], [])


def test_records_of_a_newer_version_keep_their_objects(store: ArtifactStore) -> None:
    digest = make(store, 1, b"latents")
    path = record_path(store, 1)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    make_old(object_path(store, digest))

    assert store.gc(older_than_s=DAY_S).objects == []


def test_damaged_objects_and_own_stale_temps_go_after_the_grace_hour(store: ArtifactStore) -> None:
    ref = store.put(b"latents")
    bad = object_path(store, ref.digest).with_name(f"{ref.digest}.bad")
    bad.write_bytes(b"garbage")
    own, record_temp = store.temp_path(), record_path(store, 1)
    own.write_bytes(b"half")
    record_temp.parent.mkdir(parents=True)
    record_temp = record_temp.with_name(temp_name(record_temp.name))
    record_temp.write_bytes(b"half")
    dead_pid = _dead_pid()
    stale = [
        path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{dead_pid}-")))
        for path in (own, record_temp)
    ]

    assert store.gc(older_than_s=0).leftovers == []

    make_old(bad, *stale)
    assert len(store.gc(older_than_s=0).leftovers) == 3
    assert not bad.exists()
    assert not any(path.exists() for path in stale)


def test_a_temp_of_a_living_process_stays_for_a_day(store: ArtifactStore) -> None:
    temp = store.temp_path()
    temp.write_bytes(b"half")
    os.utime(temp, (time.time() - 7200, time.time() - 7200))

    assert store.gc(older_than_s=0).leftovers == []

    os.utime(temp, (time.time() - 2 * DAY_S, time.time() - 2 * DAY_S))
    assert len(store.gc(older_than_s=0).leftovers) == 1


def test_temps_of_other_hosts_are_reported_and_left_alone(store: ArtifactStore) -> None:
    temp = store.temp_path()
    owner = temp_owner(temp.name)
    assert owner
    assert owner.is_this_host
    foreign = temp.with_name(temp.name.replace(owner.host, "another-host.example"))
    foreign.write_bytes(b"half")
    make_old(foreign)

    report = store.gc(older_than_s=0)

    assert report.leftovers == []
    assert [key.rpartition("/")[2] for key in report.foreign_temps] == [foreign.name]
    assert foreign.exists()


def test_files_that_are_none_of_ours_stay(store: ArtifactStore) -> None:
    store.put(b"x")
    strangers = [
        Path(store.url) / name
        for name in ("objects/README", "records/notes.txt", "objects/sha256/zz/" + "ab" * 32, "me")
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    make_old(*strangers)

    store.gc(older_than_s=0)

    assert all(path.exists() for path in strangers)


def test_writers_and_collection_do_not_harm_each_other(store: ArtifactStore) -> None:
    """Objects older than the grace hour are adopted while collection runs all the time."""
    done = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(150):
                data = f"content {number % 5}".encode()
                ref = store.put(data)
                assert store.read(ref) == data
                make_old(object_path(store, ref.digest))
                assert store.put(data) == ref
                assert store.read(ref) == data
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        store.gc(older_than_s=0)
    writer.join()

    assert not errors


def test_a_full_check_names_what_is_damaged_and_what_is_missing(store: ArtifactStore) -> None:
    good, bad = make(store, 1, b"good"), make(store, 2, b"bad")
    gone = make(store, 3, b"gone")
    object_path(store, bad).write_bytes(b"dab")
    object_path(store, gone).unlink()
    record_path(store, 1).write_bytes(b"")

    report = store.verify_all()

    assert not report.is_intact
    assert (report.num_objects, report.damaged) == (2, [bad])
    assert report.unreadable_records == [record_key("denoise", request(1).digest)]
    assert report.missing == {
        record_key("denoise", request(2).digest): [bad],
        record_key("denoise", request(3).digest): [gone],
    }
    assert [item.digest for item in store.ls()] == [good]


def test_a_full_check_notices_what_a_remembered_checksum_hides(store: ArtifactStore) -> None:
    """A disk that changes bytes without changing times is caught by reading everything."""
    digest = make(store, 1, b"latents")
    path = object_path(store, digest)
    store.verify_all()
    before = path.stat()
    path.write_bytes(b"LATENTS")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert store.verify_all().damaged == [digest]


def test_local_copies_of_remote_objects_go_when_unused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = ArtifactStore(f"memory://{tmp_path.name}", cache_dir=cache)
    ref = store.put(b"latents")
    store.record(request(1), StageResult(stage="denoise", artifacts={"latents": ref}))
    make_old(cache / object_key(ref.digest))

    report = store.gc(older_than_s=DAY_S)

    assert (report.cached, report.objects) == ([ref.digest], [])
    assert store.read(ref) == b"latents"


def test_a_remote_store_is_collected_too(tmp_path: Path) -> None:
    store = ArtifactStore(f"memory://{tmp_path.name}", cache_dir=tmp_path / "cache")
    ref = store.put(b"latents")
    store.record(request(1), StageResult(stage="denoise", artifacts={"latents": ref}))

    assert store.gc(older_than_s=DAY_S, grace_s=-1).objects == []
    report = store.gc(older_than_s=-1, grace_s=-1)

    assert len(report.records) == 1
    assert report.objects == [ref.digest]
    assert store.lookup(request(1)) is None
    assert store.ls() == []


def _dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid

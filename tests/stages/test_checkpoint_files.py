"""A request's checkpoints in a store, local and remote: whole, apart from others, collected."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stages.artifacts import ArtifactStore
from stages.checkpoint_files import FOLDER
from stages.contracts import StageRequest, StageResult
from stages.errors import ArtifactError
from stages.file_writes import temp_name
from tests.support.chain import request

DAY_S = 86400.0


def asked(seed: int) -> StageRequest:
    return request("denoise", {}, seed=seed)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "folder":
        return ArtifactStore(tmp_path / "store")
    return ArtifactStore(f"memory://{tmp_path.name}", cache_dir=tmp_path / "cache")


def make_old(path: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_the_newest_comes_first_and_other_requests_stay_apart(store: ArtifactStore) -> None:
    files, others = store.checkpoints(asked(1)), store.checkpoints(asked(2))
    assert files.newest_first() == []
    for step in (9, 10, 100):
        files.write(step, b"step %d" % step)
    others.write(3, b"another")
    assert [each.step for each in files.newest_first()] == [100, 10, 9]
    assert files.read(files.newest_first()[0]) == b"step 100"
    files.clear()
    assert files.newest_first() == []
    assert [each.step for each in others.newest_first()] == [3]
    assert [each.request_digest for each in store.all_checkpoints()] == [asked(2).digest]


def test_a_checkpoint_that_is_gone_or_altered_is_not_read(tmp_path: Path) -> None:
    files = ArtifactStore(tmp_path).checkpoints(asked(1))
    made = files.write(1, b"latents")
    path = tmp_path / made.key
    for altered in (b"latentz", b"laten", b"latents and more"):
        path.write_bytes(altered)
        with pytest.raises(ArtifactError, match="it is damaged"):
            files.read(made)
    path.unlink()
    with pytest.raises(ArtifactError, match="it is gone"):
        files.read(made)


def test_what_a_killed_writer_left_is_no_checkpoint_and_goes_with_the_rest(tmp_path: Path) -> None:
    files = ArtifactStore(tmp_path).checkpoints(asked(1))
    path = tmp_path / files.write(1, b"whole").key
    dead = path.with_name(temp_name(path.name).replace(f"-{os.getpid()}-", "-4194304-"))
    living = path.with_name(temp_name(path.name))
    for each in (dead, living):
        each.write_bytes(b"wh")
    assert len(files.newest_first()) == 1
    files.clear()
    assert list((tmp_path / FOLDER).iterdir()) == [living]


def test_collection_takes_those_of_answered_requests_and_those_nobody_came_back_for(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(tmp_path)
    places = {}
    for name, seed, age_s in (
        ("answered", 1, 2 * 3600.0),
        ("answered and young", 2, 60.0),
        ("waiting", 3, 2 * DAY_S),
        ("forgotten", 4, 40 * DAY_S),
    ):
        places[name] = tmp_path / store.checkpoints(asked(seed)).write(1, name.encode()).key
        make_old(places[name], age_s)
    for seed in (1, 2):
        ref = store.put(b"latents")
        result = StageResult(stage="denoise", artifacts={"latents": ref})
        store.record(asked(seed), result)

    forecast = store.gc(30 * DAY_S, dry_run=True)
    assert all(path.exists() for path in places.values())
    report = store.gc(30 * DAY_S)

    gone = {"answered", "forgotten"}
    keys = sorted(places[name].relative_to(tmp_path).as_posix() for name in gone)
    assert sorted(report.checkpoints) == sorted(forecast.checkpoints) == keys
    assert {name for name, path in places.items() if not path.exists()} == gone
    assert report.objects == [] and report.records == []
    assert report.freed_bytes == len("answered") + len("forgotten")


def test_checkpoints_are_no_artifacts(store: ArtifactStore) -> None:
    store.checkpoints(asked(1)).write(1, b"latents")
    assert store.ls() == []
    assert store.verify_all().num_objects == 0 and store.lookup(asked(1)) is None

"""What a batch will take is said before it starts, and one that cannot fit is refused."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from flows import z_image
from flows.batch import forecast
from flows.batch.forecast import BatchForecast, forecast_batch
from flows.batch.past import Past, Sample, read_past
from flows.batch.rows import Work
from flows.reports.journal import Journal
from flows.settings import RunSettings
from stages.artifacts import ArtifactStore
from stages.errors import RequestError

SMALL = Work(height=128, width=128, num_frames=1, num_inference_steps=4, is_guided=False)
LARGE = Work(height=256, width=256, num_frames=1, num_inference_steps=8, is_guided=True)
Usage = namedtuple("Usage", "total used free")


def forecasted(output: Path, jobs: dict[Work, int], **arguments: Any) -> BatchForecast:
    job = z_image.check(prompt="a", output=str(output), model="miniature", **arguments)
    return forecast_batch(jobs, job, output, RunSettings.from_env())


def sample(stage: str, work: Work, seconds: float | None = None, nbytes: int = 1000) -> Sample:
    return Sample(stage=stage, work=work, seconds=seconds, nbytes=nbytes)


def keep_run(home: Path, seconds: dict[str, float], sizes: dict[str, int], **head: Any) -> None:
    """Leave the journal of a run of one small picture, and its artifacts in the store."""
    store = ArtifactStore(RunSettings.from_env().store_url)
    artifacts = {
        f"{stage}.x": store.put(bytes(size) + stage.encode()).digest
        for stage, size in sizes.items()
    }
    header = {"family": "z-image", "model": "miniature", "dtype": "float32", "device": "cpu"}
    journal = Journal(home / "reports" / "run", header | head, pytest.fail)
    for stage, spent in seconds.items():
        journal.write(
            "request",
            stage=stage,
            cached=False,
            elapsed_s=spent,
            artifacts={"x": artifacts[f"{stage}.x"]},
        )
    settings = {"height": 128, "width": 128, "num_inference_steps": 4, "guidance_scale": 1.0}
    journal.write("item", settings=settings | {"artifacts": artifacts})
    report = {"memory": {"peak_rss_bytes": 5 * 2**20}}
    (home / "reports" / "run" / "00001-denoise.json").write_text(json.dumps(report))


def test_a_batch_that_fits_is_told_with_its_disk(tmp_path: Path, home: Path) -> None:
    found = forecasted(tmp_path / "out", {SMALL: 1000})
    found.check()
    (disk,) = found.disks
    pixels = 1000 * 128 * 128 * 3  # once in the store, once in the folder
    assert disk.need_bytes > 2 * pixels
    assert disk.holds == "artifacts and files and reports"
    assert found.elapsed_s is None
    assert "time not known" in found.sentence()


def test_a_disk_without_room_refuses_the_batch_with_need_and_room(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10**8, 10**8))
    forecasted(tmp_path / "out", {SMALL: 10}).check()
    found = forecasted(tmp_path / "out", {SMALL: 100_000})
    with pytest.raises(RequestError, match=r"need [\d.]+ GiB in .*76\.3 MiB can be used") as told:
        found.check()
    assert "--no-forecast" in str(told.value)


def test_disks_of_their_own_are_told_one_by_one(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/dev/shm` is a disk of its own wherever this runs."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second disk: /dev/shm is missing")
    monkeypatch.setenv("EXEUNT_STORE", str(shared / "exeunt-test-that-is-not-there"))
    found = forecasted(tmp_path / "out", {SMALL: 10})
    assert [disk.holds for disk in found.disks] == ["artifacts", "files and reports"]
    assert found.disks[0].folder == str(shared / "exeunt-test-that-is-not-there")


def test_past_runs_with_the_model_say_time_size_and_memory(tmp_path: Path, home: Path) -> None:
    seconds = {"encode": 0.1, "denoise": 2.0, "decode": 0.4}
    keep_run(home, seconds, {"encode": 5000, "denoise": 6000, "decode": 7000})
    found = forecasted(tmp_path / "out", {SMALL: 10})
    assert found.seconds == pytest.approx(seconds)
    assert found.elapsed_s == pytest.approx(25.0)
    assert found.host_bytes == 5 * 2**20
    blocks = 10 * 3 * 8192 + 10 * 8192  # artifacts in blocks, and the files
    others = 10 * (3 * 4096 + 4000 + 3 * 24_000)
    assert sum(disk.need_bytes for disk in found.disks) == blocks + others
    assert "from 3 results of earlier runs" in found.notes[0]


@pytest.mark.parametrize(
    "other", [{"model": "another"}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"family": "flux"}]
)
def test_runs_of_another_kind_say_nothing(
    tmp_path: Path, home: Path, other: dict[str, str]
) -> None:
    keep_run(home, {"denoise": 2.0, "decode": 1.0}, {"denoise": 10, "decode": 10}, **other)
    assert forecasted(tmp_path / "out", {SMALL: 1}).seconds == {}


def test_other_sizes_and_steps_count_in_proportion() -> None:
    past = Past([sample("denoise", SMALL, 1.0), sample("decode", SMALL, 1.0)])
    assert past.seconds("denoise", LARGE) == pytest.approx(4 * 2 * 2)  # pixels, steps, guidance
    assert past.seconds("decode", LARGE) == pytest.approx(4)
    assert past.nbytes("decode", LARGE) == 4000
    assert past.seconds("encode", LARGE) is None


def test_rows_of_the_same_size_say_more_than_others() -> None:
    past = Past([sample("decode", SMALL, 1.0), *[sample("decode", LARGE, 9.0)] * 3])
    assert past.seconds("decode", SMALL) == pytest.approx(1.0)


def test_a_damaged_journal_of_an_earlier_run_is_passed_over(tmp_path: Path, home: Path) -> None:
    keep_run(home, {"denoise": 2.0, "decode": 1.0}, {"denoise": 10, "decode": 10})
    journal = home / "reports" / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], '{"event": "item"}', "[]", "{", *lines[1:], "{"]))
    settings = RunSettings.from_env()
    past = read_past(
        settings.home.reports, store_url=settings.store_url, family="z-image",
        model="miniature", dtype="float32", device="cpu",
    )  # fmt: skip
    assert past.seconds("denoise", SMALL) == pytest.approx(2.0)


def test_a_device_that_is_too_small_refuses_the_batch(tmp_path: Path, home: Path) -> None:
    found = forecasted(
        tmp_path / "out", {SMALL: 2}, device="cuda", offload="resident", device_budget="1MiB"
    )
    with pytest.raises(RequestError, match="in phase denoise"):
        found.check()


def test_a_stage_that_needs_more_than_the_machines_memory_refuses_the_batch(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_run(home, {"denoise": 2.0, "decode": 1.0}, {"denoise": 10, "decode": 10})
    monkeypatch.setattr(forecast, "host_memory_limit_bytes", lambda: 4 * 2**20)
    with pytest.raises(RequestError, match=r"needs 5\.0 MiB of host memory, .* gives 4\.0 MiB"):
        forecasted(tmp_path / "out", {SMALL: 2}).check()


def test_videos_are_planned_with_their_frames(tmp_path: Path, home: Path, tiny: Any) -> None:
    from flows import wan
    from tests.support.video_cases import VIDEO_CASES

    model = str(tiny(VIDEO_CASES["wan"]))
    job = wan.check(prompt="a", model=model, output=str(tmp_path), device="cuda")
    settings = RunSettings.from_env()

    def device_bytes(num_frames: int) -> int:
        work = Work(
            height=64, width=64, num_frames=num_frames, num_inference_steps=4, is_guided=True
        )
        return forecast_batch({work: 3}, job, tmp_path, settings).device_bytes

    assert 0 < 2 * device_bytes(5) < device_bytes(81)

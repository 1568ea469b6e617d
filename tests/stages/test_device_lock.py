"""One stage process at a time per CUDA device, without a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages import device_lock, worker
from stages.errors import StageFailed


@pytest.fixture
def no_lock_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Path, int]]:
    held: dict[Path, int] = {}
    monkeypatch.setattr(device_lock, "_held", held)
    yield held
    for fd in held.values():
        os.close(fd)


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda", None, "gpu-0.lock"),
        ("cuda:1", None, "gpu-1.lock"),
        ("cuda:0", "3,1", "gpu-3.lock"),
        ("cuda:1", "3, 1", "gpu-1.lock"),
        ("cuda", "GPU-8f/2e", "gpu-GPU-8f_2e.lock"),
        ("cuda:1", "0,GPU-8f", "gpu-GPU-8f.lock"),
        ("cuda:2", "3,1", "gpu-2.lock"),
        ("cuda", "03", "gpu-3.lock"),
        ("cuda", "", "gpu-0.lock"),
    ],
)
def test_a_lock_is_named_after_the_device_that_is_visible_there(
    device: str, visible: str | None, name: str
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    assert device_lock.lock_path(device, "/home", environ) == Path("/home/locks", name)


@pytest.mark.parametrize("name", ["1", "GPU-8f2e"])
def test_flows_that_number_a_device_differently_share_its_lock(name: str) -> None:
    paths = {
        device_lock.lock_path(device, "/home", {"CUDA_VISIBLE_DEVICES": visible})
        for device, visible in [("cuda", name), ("cuda:1", f"0,{name}"), ("cuda:2", f"3,0,{name}")]
    }

    assert len(paths) == 1


def test_a_device_is_taken_once_and_names_its_holder(
    tmp_path: Path, no_lock_held: dict[Path, int]
) -> None:
    for _ in range(2):  # the second call must not wait for the first one's lock
        device_lock.hold_device("cuda:0", str(tmp_path), pytest.fail)

    (path,) = no_lock_held
    assert path.read_text() == f"process {os.getpid()}\n"
    assert not os.get_inheritable(no_lock_held[path])


def test_waiting_for_a_device_can_be_interrupted_and_leaves_no_descriptor(
    tmp_path: Path, no_lock_held: dict[Path, int]
) -> None:
    device_lock.hold_device("cuda", str(tmp_path), pytest.fail)
    holder = dict(no_lock_held)
    no_lock_held.clear()  # as another process would see it
    before = len(list(Path("/proc/self/fd").iterdir()))

    def interrupt(message: str) -> None:
        assert message == f"cuda is used by process {os.getpid()}"
        raise worker.Terminated

    with pytest.raises(worker.Terminated):
        device_lock.hold_device("cuda", str(tmp_path), interrupt)

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    no_lock_held.update(holder)


def test_a_lock_folder_that_cannot_be_made_fails_the_stage(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")

    with pytest.raises(StageFailed, match=r"cannot be opened: .*; choose another home_dir"):
        device_lock.hold_device("cuda", str(tmp_path / "home"), pytest.fail)

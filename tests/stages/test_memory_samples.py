"""A stage's report tells its memory over time, in few samples, and leaves no thread behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stages import memory_samples
from stages.memory_samples import MemorySamples, host_bytes


class Clock:
    """Tells one second more at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_block_has_a_sample_at_each_end() -> None:
    samples = MemorySamples(interval_s=3600.0, clock=Clock())
    with samples.taken(), samples.taken():
        pass
    columns = samples.columns()
    assert columns["at_s"] == [1.0, 2.0, 3.0, 4.0]
    assert set(columns) == {"at_s", "anonymous_bytes", "file_backed_bytes", "locked_bytes"}
    assert all(len(column) == 4 for column in columns.values())
    assert all(nbytes > 0 for nbytes in columns["anonymous_bytes"])


def test_a_thread_samples_in_between_and_ends_with_the_block() -> None:
    seen = threading.Semaphore(0)

    def read_device() -> int:
        if threading.current_thread().name == "memory":
            seen.release()
        return 5

    samples = MemorySamples(read_device, interval_s=0.001)
    with pytest.raises(KeyError), samples.taken():
        for _ in range(3):
            assert seen.acquire(timeout=30)
        raise KeyError
    assert not [each for each in threading.enumerate() if each.name == "memory"]
    assert set(samples.columns()["device_used_bytes"]) == {5}
    assert len(samples.columns()["at_s"]) >= 5


def test_a_long_stage_keeps_few_samples_of_its_whole_time() -> None:
    samples = MemorySamples(interval_s=1.0, most=10, clock=Clock())
    for _ in range(1000):
        samples.take()
    at_s = samples.columns()["at_s"]
    assert len(at_s) <= 10 and at_s[0] == 1.0 and at_s[-1] > 900


def test_new_memory_shows_as_anonymous() -> None:
    before = host_bytes()["anonymous_bytes"]
    held = bytearray(b"\1") * (64 << 20)
    assert host_bytes()["anonymous_bytes"] - before > 60 << 20
    del held


def test_a_kernel_that_tells_nothing_leaves_times_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_samples, "_STATUS", tmp_path / "absent")
    samples = MemorySamples(interval_s=3600.0)
    with samples.taken():
        pass
    assert list(samples.columns()) == ["at_s"]

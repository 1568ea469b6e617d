"""One holder per key, across threads and processes, and none that outlives its process."""

from __future__ import annotations

import asyncio
import copy
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prefect.locking.protocol import LockManager

from flows import locks
from flows.locks import FlockLockManager, while_waiting

# Takes locks without importing Prefect, so that a process costs milliseconds.
HOLDER = """
import sys, time
from pathlib import Path
from flows.locks import FlockLockManager
manager = FlockLockManager(Path(sys.argv[1]))
manager.acquire_lock("denoise/ab", "child")
print("held", flush=True)
time.sleep(600)
"""

FORKING_HOLDER = """
import os, sys, time
from pathlib import Path
from flows.locks import FlockLockManager
manager = FlockLockManager(Path(sys.argv[1]))
manager.acquire_lock("denoise/ab", "parent")
ready, is_ready = os.pipe()
if os.fork() == 0:
    os.write(is_ready, b".")
    sys.stdin.read()
    print("child ends", flush=True)
    os._exit(0)
os.read(ready, 1)
print("held", flush=True)
time.sleep(600)
"""

COUNTER = """
import sys
from pathlib import Path
from flows.locks import FlockLockManager
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
manager = FlockLockManager(folder / "locks")
count = folder / "count"
for number in range(rounds):
    manager.acquire_lock("k", "me")
    before = int(count.read_text())
    count.write_text(str(before + 1))
    manager.release_lock("k", "me")
"""


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )


@pytest.fixture
def manager(tmp_path: Path) -> FlockLockManager:
    return FlockLockManager(tmp_path / "locks")


def test_it_fits_prefects_protocol(manager: FlockLockManager) -> None:
    assert isinstance(manager, LockManager)


def test_a_lock_has_one_holder_until_it_is_released(manager: FlockLockManager) -> None:
    assert manager.acquire_lock("encode/ab", "one")
    assert manager.acquire_lock("encode/ab", "one"), "its holder may ask again"
    assert not manager.acquire_lock("encode/ab", "two", acquire_timeout=0)
    assert manager.acquire_lock("encode/cd", "two", acquire_timeout=0), "another key is free"
    assert manager.is_locked("encode/ab")
    assert manager.is_lock_holder("encode/ab", "one")
    assert not manager.is_lock_holder("encode/ab", "two")
    manager.release_lock("encode/ab", "one")
    assert not manager.is_locked("encode/ab")
    assert manager.acquire_lock("encode/ab", "two", acquire_timeout=0)
    manager.release_lock("encode/ab", "two")
    manager.release_lock("encode/cd", "two")


def test_only_the_holder_can_release(manager: FlockLockManager) -> None:
    with pytest.raises(ValueError, match="two does not hold the lock of k"):
        manager.release_lock("k", "two")
    manager.acquire_lock("k", "one")
    with pytest.raises(ValueError, match="two does not hold the lock of k"):
        manager.release_lock("k", "two")
    manager.release_lock("k", "one")


def test_two_managers_of_one_folder_share_its_locks(tmp_path: Path) -> None:
    one, two = FlockLockManager(tmp_path), FlockLockManager(tmp_path)
    one.acquire_lock("k", "me")
    assert two.is_locked("k")
    assert not two.acquire_lock("k", "me", acquire_timeout=0)
    assert not two.wait_for_lock("k", timeout=0)
    one.release_lock("k", "me")
    assert two.wait_for_lock("k", timeout=0)


def test_no_file_stays_behind(manager: FlockLockManager) -> None:
    manager.acquire_lock("k", "one")
    assert len(list(manager.directory.iterdir())) == 1
    manager.release_lock("k", "one")
    assert not manager.is_locked("k")
    assert list(manager.directory.iterdir()) == []


@pytest.mark.parametrize("key", ["a/b", "../../up", "x" * 5000, "a.b", "ключ"])
def test_any_text_can_be_a_key(manager: FlockLockManager, key: str) -> None:
    assert manager.acquire_lock(key, "one")
    (path,) = manager.directory.iterdir()
    assert path.parent == manager.directory
    manager.release_lock(key, "one")


def test_copies_are_the_same_manager_and_pickles_share_its_folder(
    manager: FlockLockManager,
) -> None:
    assert copy.deepcopy({"policy": manager})["policy"] is manager
    manager.acquire_lock("k", "one")
    other = pickle.loads(pickle.dumps(manager))
    assert other.is_locked("k")
    manager.release_lock("k", "one")
    assert not other.is_locked("k")


def test_the_folder_may_be_settled_at_the_first_lock(tmp_path: Path) -> None:
    folder: list[Path] = []
    manager = FlockLockManager(lambda: folder[0])
    folder.append(tmp_path / "late")
    assert manager.acquire_lock("k", "one")
    assert (tmp_path / "late").is_dir()
    manager.release_lock("k", "one")


def test_locks_can_be_awaited(manager: FlockLockManager) -> None:
    async def scenario() -> tuple[bool, bool, bool]:
        first = await manager.aacquire_lock("k", "one")
        second = await manager.aacquire_lock("k", "two", acquire_timeout=0)
        manager.release_lock("k", "one")
        return first, second, await manager.await_for_lock("k", timeout=0)

    assert asyncio.run(scenario()) == (True, False, True)


def test_a_killed_holder_leaves_its_lock_to_the_waiter(manager: FlockLockManager) -> None:
    with python(HOLDER, str(manager.directory)) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not manager.acquire_lock("denoise/ab", "me", acquire_timeout=0)
        got: list[bool] = []
        waiter = threading.Thread(
            target=lambda: got.append(manager.acquire_lock("denoise/ab", "me", 60))
        )
        waiter.start()
        holder.send_signal(signal.SIGKILL)
        waiter.join()
    assert got == [True]
    manager.release_lock("denoise/ab", "me")


def test_two_runs_that_hold_what_the_other_one_needs_both_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holds a result's lock and waits for the device; the other's idle process holds that."""
    monkeypatch.setattr(locks, "GIVE_UP_AFTER_S", 0.05)
    one, other = FlockLockManager(tmp_path), FlockLockManager(tmp_path)
    device = threading.Lock()
    one.acquire_lock("denoise/ab", "one")
    device.acquire()  # by the process that the other one keeps from its last row

    def compute() -> None:
        with device:
            one.release_lock("denoise/ab", "one")

    computing = threading.Thread(target=compute)
    computing.start()
    with while_waiting(device.release):
        assert other.acquire_lock("denoise/ab", "other", acquire_timeout=10)
    computing.join()
    other.release_lock("denoise/ab", "other")


def test_nothing_is_given_up_for_a_lock_that_is_free(manager: FlockLockManager) -> None:
    given_up: list[str] = []
    with while_waiting(lambda: given_up.append("device")):
        assert manager.acquire_lock("k", "me")
        manager.release_lock("k", "me")
    assert given_up == []


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(
    manager: FlockLockManager,
) -> None:
    """A flock belongs to the open file, which parent and child share."""
    with python(FORKING_HOLDER, str(manager.directory)) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert manager.acquire_lock("denoise/ab", "me", acquire_timeout=0), "the child lives on"
        holder.stdin.close()  # ends the child
        assert holder.stdout.read() == "child ends\n"
    manager.release_lock("denoise/ab", "me")


def test_a_file_that_is_released_between_open_and_flock_is_not_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (FlockLockManager(tmp_path) for _ in range(3))
    one.acquire_lock("k", "one")
    flock = fcntl.flock

    def flock_late(fd: int, operation: int) -> None:
        if one.is_lock_holder("k", "one"):
            one.release_lock("k", "one")
        flock(fd, operation)

    monkeypatch.setattr("flows.locks.fcntl.flock", flock_late)
    assert two.acquire_lock("k", "two", acquire_timeout=0)
    assert not three.acquire_lock("k", "three", acquire_timeout=0)
    two.release_lock("k", "two")


def test_three_processes_lose_no_count(tmp_path: Path) -> None:
    """Read, add one, write: a lock that lets two in at a time loses some of the additions."""
    (tmp_path / "count").write_text("0")
    processes = [python(COUNTER, str(tmp_path), "150") for _ in range(3)]
    for process in processes:
        with process:
            pass
        assert process.returncode == 0
    assert (tmp_path / "count").read_text() == "450"

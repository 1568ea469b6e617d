"""One stage process at a time per CUDA device, by a file lock that dies with its holder."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stages.errors import StageFailed

POLL_S = 0.1
REPORT_S = 1.0

_held: dict[Path, int] = {}
"""Lock files of this process and their descriptors, open until the process ends."""


def lock_path(device: str, home_dir: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The lock file of `cuda` or `cuda:N`, named after the device and not after its number here.

    Entry N of `CUDA_VISIBLE_DEVICES`, where it is set, says which device this process calls N:
    an index or a UUID, kept as it is. So two flows meet in one file although each numbers the
    device differently. They miss each other when one names it by its index and the other by
    its UUID, a part of it or a MIG instance, or when their `CUDA_DEVICE_ORDER` differs: only
    the driver knows that these are one device, and it is not asked.
    """
    index = int(device.partition(":")[2] or 0)
    visible = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    entry = visible[index] if index < len(visible) and visible[index] else str(index)
    name = str(int(entry)) if entry.isdecimal() else re.sub(r"[^A-Za-z0-9_.-]", "_", entry)
    return Path(home_dir) / "locks" / f"gpu-{name}.lock"


def hold_device(device: str, home_dir: str, on_wait: Callable[[str], None]) -> None:
    """Make this process the device's only stage process, until it ends.

    Args:
        device: `cuda` or `cuda:N`.
        home_dir: Flows that share it take turns; its folder `locks` is made when absent.
        on_wait: Told who holds the device, at once and then each second of waiting.

    Raises:
        StageFailed: The lock file cannot be opened.

    Blocks until the device is free. Call it before the first CUDA call: a context takes
    memory even while it waits. A second call for the same device returns at once.
    """
    path = lock_path(device, home_dir)
    if path in _held:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not inheritable: a program that this stage starts must not keep the device taken.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StageFailed(
            f"device lock {path} cannot be opened: {error.strerror}; choose another home_dir"
        ) from error
    try:
        _take(fd, device, on_wait)
    except BaseException:
        os.close(fd)
        raise
    _held[path] = fd


def _take(fd: int, device: str, on_wait: Callable[[str], None]) -> None:
    next_report = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= next_report:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "another process"
                on_wait(f"{device} is used by {holder}")
                next_report += REPORT_S
            time.sleep(POLL_S)
        else:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
            return

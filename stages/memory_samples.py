"""Memory of a stage process over time: a few readings a second, for its report.

A sample is taken where a host phase begins and ends, and by a thread in between. It reads
`/proc` and one counter of the device's driver, and touches neither a stream nor a tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 0.25
MOST_SAMPLES = 240
"""A long stage keeps every second sample and takes them half as often, over and over."""

KINDS = {"RssAnon": "anonymous_bytes", "RssFile": "file_backed_bytes", "VmLck": "locked_bytes"}
_STATUS = Path("/proc/self/status")


def host_bytes() -> dict[str, int]:
    """This process's memory by kind; empty where the kernel does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {KINDS[key]: int(rest.split()[0]) * 1024 for key, _, rest in pairs if key in KINDS}


class MemorySamples:
    """Readings of host and device memory, from the start of a request on.

    Args:
        read_device: Bytes of the device that are in use, whoever uses them; None without one.
        interval_s: Seconds between two samples, at first.
        most: The most samples that are kept.
    """

    def __init__(
        self,
        read_device: Callable[[], int] | None = None,
        *,
        interval_s: float = INTERVAL_S,
        most: int = MOST_SAMPLES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read_device, self._clock, self._most = read_device, clock, most
        self._interval_s = interval_s
        self._started = clock()
        self._rows: list[tuple[float, dict[str, int]]] = []  # guarded by _mutex
        self._mutex = threading.Lock()
        self._is_open = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While open, samples are taken; inside of another such block, only at its two ends."""
        self.take()
        if self._is_open:
            yield
            self.take()
            return
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), name="memory", daemon=True)
        self._is_open = True
        thread.start()
        try:
            yield
        finally:
            self._is_open = False
            over.set()
            thread.join()
            self.take()

    def take(self) -> None:
        """Take one sample now."""
        found = host_bytes()
        if self._read_device is not None:
            with suppress(RuntimeError):  # a broken device fails its stage, with a better message
                found["device_used_bytes"] = self._read_device()
        at_s = round(self._clock() - self._started, 4)
        with self._mutex:
            self._rows.append((at_s, found))
            if len(self._rows) > self._most:
                self._rows = self._rows[::2]
                self._interval_s *= 2

    def columns(self) -> dict[str, list[float] | list[int]]:
        """`at_s` and one list of bytes for each kind of memory, all of one length."""
        with self._mutex:
            rows = sorted(self._rows, key=lambda row: row[0])
        names = sorted({name for _, found in rows for name in found})
        columns: dict[str, list[float] | list[int]] = {"at_s": [at_s for at_s, _ in rows]}
        for name in names:
            columns[name] = [found.get(name, 0) for _, found in rows]
        return columns

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._interval_s):
            self.take()

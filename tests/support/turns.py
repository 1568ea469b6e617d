"""Two commands side by side, of which one runs at a time: a drift of the machine hits both.

While one runs, every process of the other is stopped, and its clock with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass
class Contender:
    """A command and its processes.

    Attributes:
        pids: All living processes of it.
        wall_s: Seconds in which it could run.
    """

    process: subprocess.Popen[bytes]
    pids: Callable[[], list[int]]
    wall_s: float = 0.0

    def send(self, signum: int) -> None:
        """Send a signal to every process, those that appear meanwhile included."""
        told: set[int] = set()
        while new := set(self.pids()) - told:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            told |= new


def take_turns(contenders: Mapping[str, Contender], slice_s: float = 3.0) -> None:
    """Run each for a slice in turn until all have ended; their times are in `wall_s`.

    Raises:
        RuntimeError: One of them has failed.
    """
    waiting = list(contenders.values())
    for each in waiting:
        each.send(signal.SIGSTOP)
    while waiting:
        for each in list(waiting):
            start = time.perf_counter()
            each.send(signal.SIGCONT)
            try:
                code = each.process.wait(timeout=slice_s)
            except subprocess.TimeoutExpired:
                each.wall_s += time.perf_counter() - start
                each.send(signal.SIGSTOP)
                continue
            each.wall_s += time.perf_counter() - start
            waiting.remove(each)
            if code:
                for other in waiting:
                    other.send(signal.SIGKILL)
                raise RuntimeError(f"{each.process.args!r} has ended with {code}")

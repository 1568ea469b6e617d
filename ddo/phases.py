"""Where the time of setting up goes: a stopwatch for phases that may lie inside of each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal[
    "read_headers",
    "build",
    "associate",
    "open_device",
    "measure_link",
    "find_sources",
    "plan",
    "register",
    "make_ring",
    "first_fill",
]


class Phases:
    """Seconds by phase, each without those of the phases inside of it. One thread at a time.

    Attributes:
        seconds: By phase, in the order in which they first ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []  # seconds of phases inside of each running one
        self._is_over = False

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time of the block to a phase; afterwards to none, once `close` was called."""
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - start
            own_s = elapsed_s - self._inside.pop()
            if self._inside:
                self._inside[-1] += elapsed_s
            if not self._is_over:
                self.seconds[name] = self.seconds.get(name, 0.0) + own_s

    def close(self) -> None:
        """Setting up is over: what is done again later is not counted."""
        self._is_over = True

"""What stage processes cost: `python -m tests.benchmarks.launch_bench`, JSON on standard output.

The fork server imports what it imports for real; the stages are fakes, so every second here
is the launcher's own, or an import's. Bars: a child after the first is ready in 0.1 s; a
request costs 0.05 s beyond its stage.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

from flows.launch import Launcher
from flows.session import StageSession
from flows.stage_process import Event
from stages.protocol import Ready
from tests.support.fake_stages import ENVIRON, context, request

NUM_CHILDREN = 20
NUM_REQUESTS = 200
MIB = 2**20


class Stopwatch:
    """Seconds from its making to the child's `Ready`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ready_s = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Ready):
            self.ready_s = time.perf_counter() - self.started


def ask(session: StageSession, do: str, value: Any = None) -> dict[str, Any]:
    return session.run(request(do, value), context(Path.cwd()))[1]


def memory_bytes(pid: int) -> dict[str, int]:
    """Proportional and private memory of a process."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size) * 1024
    return {"pss": sizes["Pss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def measure(method: Literal["forkserver", "spawn"], num_children: int) -> dict[str, Any]:
    """Start children one after the other and drive them.

    Returns:
        Seconds until the first child and (median) a later one is ready, until a ready one has
        the libraries, per request and per retirement (medians); MiB of a child that has them.
    """
    ready_s: list[float] = []
    retire_s: list[float] = []
    request_s: list[float] = []
    libraries_s = 0.0
    memory: dict[str, int] = {}
    with Launcher(method, environ=ENVIRON) as launcher:
        launcher.expect("z-image")
        for _ in range(num_children):
            watch = Stopwatch()
            with StageSession("encode", launcher, on_event=watch) as session:
                pid = ask(session, "echo")["pid"]
                ready_s.append(watch.ready_s)
                if not memory:  # once: a spawned child takes seconds for it
                    started = time.perf_counter()
                    ask(session, "import")
                    libraries_s = time.perf_counter() - started
                    memory = memory_bytes(pid)
                started = time.perf_counter()
                for _ in range(NUM_REQUESTS // num_children):
                    ask(session, "echo")
                request_s.append((time.perf_counter() - started) / (NUM_REQUESTS // num_children))
                started = time.perf_counter()
            retire_s.append(time.perf_counter() - started)
        assert launcher.method == method, "the fork server was lost; see standard error"
    return {
        "first_ready_s": round(ready_s[0], 3),
        "ready_s": round(statistics.median(ready_s[1:]), 4),
        "ready_s_max": round(max(ready_s[1:]), 4),
        "libraries_s": round(libraries_s, 3),
        "request_s": round(statistics.median(request_s), 5),
        "retire_s": round(statistics.median(retire_s), 4),
        **{f"{name}_mib": round(nbytes / MIB, 1) for name, nbytes in memory.items()},
    }


def main() -> None:
    print(
        json.dumps(
            {
                "machine": {"processor": platform.processor(), "cpus": os.cpu_count()},
                "python": sys.version.split()[0],
                "num_children": NUM_CHILDREN,
                "forkserver": measure("forkserver", NUM_CHILDREN + 1),
                "spawn": measure("spawn", 6),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

"""Counts what torch has compiled. Imports no torch: until it compiles, the counts are zero."""

from __future__ import annotations

import sys
import time
from typing import Any


class CompileCounts:
    """What torch has compiled in this process since this was made."""

    def __init__(self) -> None:
        self._began_us = time.time_ns() // 1000
        self._before = _count()

    def read(self) -> dict[str, int]:
        """Graphs, graph breaks, and recompilations for inputs that no graph was made for.

        Torch remembers its last 64 compilations; more recompilations than that are not seen.
        """
        utils = sys.modules.get("torch._dynamo.utils")
        past = utils.get_compilation_metrics() if utils is not None else []
        again = [m for m in past if m.recompile_reason and m.start_time_us >= self._began_us]
        counts = {name: n - self._before[name] for name, n in _count().items()}
        return {**counts, "num_recompiles": len(again)}


def _count() -> dict[str, int]:
    utils = sys.modules.get("torch._dynamo.utils")
    counters: dict[str, Any] = utils.counters if utils is not None else {}
    return {
        "num_graphs": counters.get("stats", {}).get("unique_graphs", 0),
        "num_graph_breaks": sum(counters.get("graph_break", {}).values()),
    }

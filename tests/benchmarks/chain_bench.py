"""What the whole command costs on this machine, beside Prefect's own trivial flow.

usage: python -m tests.benchmarks.chain_bench [--runs 5]

Prints one JSON document. All runs are whole processes against one server, in turn, so that a
drift of the machine hits both sides:
- `trivial_flow`: a script with one Prefect flow of one persisted task, a cache hit;
- `cached`: `exeunt z-image` whose every stage has its result;
- `new_seed`: the same with a seed that was never painted;
- `first_ever`: empty home: server start with migrations, inspection, encode and all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stages.models import resolve_model
from tests.support.kills import Victim

TRIVIAL = """
from prefect import flow, task
from prefect.cache_policies import INPUTS

@task(persist_result=True, cache_policy=INPUTS)
def double(x: int) -> int:
    return 2 * x

@flow(persist_result=False)
def trivial() -> int:
    return double(21)

if __name__ == "__main__":
    trivial()
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="miniature")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exeunt-bench-") as folder:
        victim = Victim(Path(folder) / "home", resolve_model(options.model))
        try:
            print(json.dumps(measure(victim, Path(folder), options.runs), indent=1))
        finally:
            victim.stop_server()


def measure(victim: Victim, folder: Path, runs: int) -> dict[str, Any]:
    """The figures, in seconds of wall clock."""
    first_ever, _ = timed(victim, seed=1)
    script = folder / "trivial.py"
    script.write_text(TRIVIAL)
    environ = server_environ(victim)
    trivial(script, environ)
    times: dict[str, list[float]] = {"trivial_flow": [], "cached": [], "new_seed": []}
    parts: list[dict[str, float]] = []
    timed(victim, seed=1)
    for number in range(runs):
        times["trivial_flow"].append(trivial(script, environ))
        elapsed_s, last = timed(victim, seed=1)
        assert not last["made"], last
        times["cached"].append(elapsed_s)
        elapsed_s, last = timed(victim, seed=100 + number)
        assert last["made"] == {"denoise": 1, "decode": 1}, last
        times["new_seed"].append(elapsed_s)
        parts.append(newest_reports(victim))
    medians = {name: round(statistics.median(each), 3) for name, each in times.items()}
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "runs": runs,
        "first_ever_s": round(first_ever, 3),
        "median_s": medians,
        "all_s": {name: [round(value, 3) for value in each] for name, each in times.items()},
        "cached_minus_trivial_s": round(medians["cached"] - medians["trivial_flow"], 3),
        "new_seed_inside_stages_s": {
            stage: round(statistics.median(part[stage] for part in parts), 3)
            for stage in ("denoise", "decode")
        },
    }


def timed(victim: Victim, seed: int) -> tuple[float, dict[str, Any]]:
    """Seconds of one command, and its last event."""
    start = time.perf_counter()
    code, last, err = victim.finish(victim.start(seed))
    elapsed_s = time.perf_counter() - start
    assert code == 0, err
    return elapsed_s, last


def server_environ(victim: Victim) -> dict[str, str]:
    """The environment in which a script meets the command's own server."""
    state = json.loads((victim.home / "prefect" / "server.json").read_text())
    return os.environ | {
        "PREFECT_HOME": str(victim.home / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{state['port']}/api",
        "DO_NOT_TRACK": "1",
    }


def trivial(script: Path, environ: dict[str, str]) -> float:
    """Seconds of the trivial flow as a whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, str(script)], env=environ, check=True, capture_output=True)
    return time.perf_counter() - start


def newest_reports(victim: Victim) -> dict[str, float]:
    """Seconds inside each stage process of the newest run, by stage."""
    newest = max((victim.home / "reports").iterdir(), key=lambda path: path.stat().st_mtime)
    reports = [json.loads(path.read_text()) for path in newest.glob("*.json")]
    return {report["stage"]: report["elapsed_s"] for report in reports}


if __name__ == "__main__":
    main()

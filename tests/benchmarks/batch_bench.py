"""What a batch costs beside a plain diffusers loop over the same rows.

usage: python -m tests.benchmarks.batch_bench loop [--rows 1000] [--threads 1]
           [--kind modular]
       python -m tests.benchmarks.batch_bench each [--rows 10] [--threads 1]
       python -m tests.benchmarks.batch_bench many [--rows 10000] [--threads 1]

Prints JSON lines. `loop` runs the rows plain and as a batch, in slices of three seconds that take
turns, so that a drift of the machine hits both; `each` starts a process for every row; `many` runs
rows of little work on a stub denoiser and then waits until the server has recorded every task run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flows.batch import results
from stages.models import resolve_model
from tests.support.kills import Victim
from tests.support.stub_denoiser import ENVIRON as STUB
from tests.support.torture import read_pixels
from tests.support.turns import Contender, take_turns

REPOSITORY = Path(__file__).resolve().parents[2]
BACKLOG_GIVE_UP_S = 900.0


@dataclass
class Cost:
    """What a command took.

    Attributes:
        cpu_s: Of it and the processes that it has started and waited for.
        peak_rss_bytes: Of it alone.
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["loop", "each", "many"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kind", choices=["modular", "classic"], default="modular")
    parser.add_argument("--edge", type=int, default=128, help="pixels")
    parser.add_argument("--rows-per-prompt", type=int, default=1)
    options = parser.parse_args()
    environ = {"OMP_NUM_THREADS": str(options.threads), "EXEUNT_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory(prefix="exeunt-batch-bench-") as name:
        folder, model = Path(name), resolve_model("miniature")
        if options.what == "many":
            environ |= STUB
        victim = Victim(folder / "home", model, environ)
        bench = Bench(victim, folder, options.edge, options.rows_per_prompt)
        bench.batch("warm", bench.table("warm", range(2)))  # starts the server, inspects the model
        try:
            match options.what:
                case "loop":
                    bench.loop(options.rows or 1000, options.kind)
                case "each":
                    bench.each(options.rows or 10, options.kind)
                case _:
                    bench.many(options.rows or 10_000)
        finally:
            bench.victim.stop_server()


class Bench:
    """Runs tables in one home."""

    def __init__(self, victim: Victim, folder: Path, edge: int, rows_per_prompt: int) -> None:
        self.victim, self.folder, self.edge = victim, folder, edge
        self.rows_per_prompt = rows_per_prompt
        self._environ = victim.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def table(self, name: str, numbers: range) -> Path:
        """A table of rows, each with a seed of its own."""
        path = self.folder / f"{name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "prompt", "seed", "height", "width"])
            for n in numbers:
                prompt = f"a red circle and {n // self.rows_per_prompt} blue squares, {name}"
                writer.writerow([f"{n:06d}", prompt, n, self.edge, self.edge])
        return path

    def loop(self, num_rows: int, kind: str) -> None:
        """The rows plain and as a batch, in slices of seconds that take turns."""
        table = self.table("loop", range(num_rows))
        with (self.folder / "log.txt").open("ab") as log:
            plain = self._start(self._plain_command(table, kind), log, {"EXEUNT_HOME": "/plain"})
            batch = self._start(self._batch_command("loop", table), log, {})
            contenders = {
                "plain": Contender(plain, lambda: [plain.pid] if plain.poll() is None else []),
                "batch": Contender(batch, lambda: list(self.victim.processes())),
            }
            take_turns(contenders)
        self._require_all_done("loop", num_rows)
        if kind == "modular":
            self._require_same_pixels("loop")
        spent = {name: round(each.wall_s, 2) for name, each in contenders.items()}
        ratio = spent["batch"] / spent["plain"]
        tell(what="loop", kind=kind, rows=num_rows, ratio=round(ratio, 4), **spent)

    def each(self, num_rows: int, kind: str) -> None:
        """One plain process per row, against the batch's rows."""
        table = self.table("each", range(num_rows))
        header, *lines = table.read_text().splitlines()
        spent = 0.0
        for n, line in enumerate(lines):
            one = self.folder / f"one{n}.csv"
            one.write_text(f"{header}\n{line}\n")
            spent += self.plain(one, kind).wall_s
        tell(what="one process a row", rows=num_rows, wall_s=spent, s_per_row=spent / num_rows)
        cost = self.batch("each", table)
        tell(what="batch", rows=num_rows, s_per_row=cost.wall_s / num_rows, **asdict(cost))

    def many(self, num_rows: int) -> None:
        """Many rows of little work; what client and server take."""
        table = self.table("many", range(num_rows))
        before = self.recorded()
        cost = self.batch("many", table, "--num-inference-steps", "2", "--guidance-scale", "1")
        ended = time.monotonic()
        expected = before + 2 * num_rows + -(-num_rows // self.rows_per_prompt)
        while (found := self.recorded()) < expected:
            if time.monotonic() - ended > BACKLOG_GIVE_UP_S:
                break
            time.sleep(1.0)
        tell(
            what="many",
            rows=num_rows,
            rows_per_s=round(num_rows / cost.wall_s, 2),
            backlog_s=round(time.monotonic() - ended, 1),
            recorded=found - before,
            expected=expected - before,
            **asdict(cost),
        )

    def plain(self, table: Path, kind: str) -> Cost:
        """The rows in one plain process."""
        return self._run(self._plain_command(table, kind))

    def _plain_command(self, table: Path, kind: str) -> list[str]:
        module = "tests.benchmarks.batch_plain"
        arguments = [str(table), str(self.folder / f"plain-{table.stem}"), str(self.victim.model)]
        return [sys.executable, "-m", module, *arguments, kind]

    def batch(self, name: str, table: Path, *more: str) -> Cost:
        """The rows as a batch in an output folder of its own; every one has to be done."""
        cost = self._run(self._batch_command(name, table, *more))
        self._require_all_done(name)
        return cost

    def _batch_command(self, name: str, table: Path, *more: str) -> list[str]:
        command = [sys.executable, "-m", "flows", "batch", str(table), "--family", "z-image"]
        output = str(self.folder / f"out-{name}")
        return [*command, "--model", str(self.victim.model), "--output", output, *more]

    def _require_all_done(self, name: str, num_rows: int | None = None) -> None:
        found = results.read(self.folder / f"out-{name}" / results.NAME)
        states = {row.status for row in found}
        assert states == {"done"} and num_rows in (None, len(found)), (states, len(found))

    def _require_same_pixels(self, name: str) -> None:
        """What is compared has to be the same work, and so the same pictures."""
        batch, plain = self.folder / f"out-{name}", self.folder / f"plain-{name}"
        for path in sorted(plain.glob("*.png")):
            if not np.array_equal(read_pixels(path), read_pixels(batch / path.name)):
                sys.exit(f"the plain loop paints {path.name} otherwise")

    def _start(
        self, command: list[str], log: Any, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self._environ | environ,
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def recorded(self) -> int:
        """Task runs that the server knows."""
        import urllib.request

        from flows.server import read_state
        from flows.settings import Home

        state = read_state(Home(root=self.victim.home))
        if state is None:
            return 0
        request = urllib.request.Request(
            f"{state.api_url}/task_runs/count",
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.read())

    def _run(self, command: list[str]) -> Cost:
        start = time.perf_counter()
        peak = 0
        with (self.folder / "log.txt").open("ab") as log:
            process = self._start(command, log, {})
            done = threading.Event()

            def watch() -> None:
                nonlocal peak
                while not done.wait(0.5):
                    peak = max(peak, peak_rss_bytes(process.pid))

            watcher = threading.Thread(target=watch)
            watcher.start()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            wall = time.perf_counter() - start
            done.set()
            watcher.join()
        if process.returncode:
            sys.exit((self.folder / "log.txt").read_text()[-4000:])
        cpu = usage.ru_utime + usage.ru_stime
        return Cost(wall_s=round(wall, 3), cpu_s=round(cpu, 3), peak_rss_bytes=peak)


def peak_rss_bytes(pid: int) -> int:
    """A living process's largest resident memory so far."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def tell(**values: object) -> None:
    """Print one JSON line."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()

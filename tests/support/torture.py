"""A batch that is given again and again while its parts are killed and its disks fill up.

Rows are good, bad, or poison. When the command ends by itself, and once more with the failed
rows retried and nothing disturbed, the verdict is: every good row has exactly one picture with
the right pixels, every other row its reason, and no more work was done twice than was in flight.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from flows.batch import results
from flows.batch.results import RowResult
from flows.exit_codes import EXIT_OK, EXIT_STAGE_FAILED
from stages.artifacts import ArtifactStore
from tests.support.deployed_batch import flow_processes, worker_processes
from tests.support.kills import Victim
from tests.support.poison import FAILS, KILLS
from tests.support.watched_poison import ENVIRON, FILE_VARIABLE

MAX_STARTS = 200
COMMAND_TIMEOUT_S = 900
FULL_DISK_S = 3.0

Pixels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        status: What has to become of it.
        reason: A part of the error that it has to have; empty for a good row.
    """

    cells: dict[str, Any]
    status: str = "done"
    reason: str = ""

    @property
    def id(self) -> str:
        return str(self.cells["id"])


@dataclass
class Verdict:
    """What was left of the batch.

    Attributes:
        hits: Blows that found their target, by target.
        exits: How the starts ended, by exit code.
        begun: Requests that a stage process began.
        again: Of them, begun before by another process, those of poison rows aside.
        faults: What should not have been; has to be empty.
    """

    num_rows: int
    hits: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    begun: int = 0
    again: int = 0
    faults: list[str] = field(default_factory=list)


def rows(num_rows: int) -> list[Row]:
    """Mostly good rows; of each ten two are bad, and of each fifty four are poison."""
    made = []
    for n in range(num_rows):
        cells: dict[str, Any] = {"id": f"r{n:04d}", "prompt": f"a fox, number {n // 2}", "seed": n}
        if n % 10 == 3:
            made.append(Row(cells | {"height": 777}, "invalid", "777"))
        elif n % 10 == 8:
            made.append(Row(cells | {"image": "gone.png"}, "invalid", "gone.png"))
        elif n % 25 == 6:
            made.append(Row(cells | {"prompt": f"{FAILS} {n}"}, "failed", "this row is poison"))
        elif n % 25 == 11:
            made.append(Row(cells | {"prompt": f"{KILLS} {n}"}, "failed", "SIGKILL"))
        else:
            made.append(Row(cells))
    return made


class Torture:
    """One batch, its table and its enemies.

    Args:
        folder: For the table; home and output lie below `disk`.
        disk: A folder on a disk of its own if disks are to be filled, else any.
        arguments: Of the family, for all rows, by name.
        chunk: Rows of a chunk.
        deployed: Whether a worker runs the batch, and not the command.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        table: Sequence[Row],
        arguments: Mapping[str, int | float],
        *,
        chunk: int,
        disk: Path,
        deployed: bool = False,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.rows, self.folder, self.disk = list(table), folder, disk
        self.output = disk / "out"
        self._begun = folder / "begun.txt"
        own = ENVIRON | {FILE_VARIABLE: str(self._begun), "EXEUNT_STORE": str(disk / "store")}
        self.victim = Victim(folder / "home", model, own | (environ or {}))
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row.cells) + "\n" for row in self.rows))
        self._parameters = {
            "table": str(path),
            "family": "z-image",
            "output": str(self.output),
            "chunk": chunk,
            "arguments": {"model": str(model), **arguments},
        }
        self._is_deployed = deployed
        self.verdict = Verdict(len(self.rows))

    def play(
        self,
        targets: Sequence[str],
        *,
        seed: int,
        between_s: tuple[float, float],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Give the batch until it ends by itself and every blow has fallen, or no row is left.

        Args:
            targets: `child`, `flow`, `server`, `worker` or `disk`, in the order of the blows.
            between_s: Least and most seconds between two blows.
        """
        draw = random.Random(seed)
        left = list(targets)
        for _ in range(MAX_STARTS):
            process = self._start()
            deadline = time.monotonic() + COMMAND_TIMEOUT_S
            while left and not _ends_within(process, draw.uniform(*between_s)):
                if self._strike(left[0], process):
                    tell(f"{left[0]} was hit")
                    self.verdict.hits[left.pop(0)] += 1
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            self.verdict.exits[code] += 1
            tell(f"start {self.verdict.exits.total()} ended with {code}, {len(left)} blows left")
            if code in (EXIT_OK, EXIT_STAGE_FAILED):
                return
        self.verdict.faults.append(f"the batch has not ended after {MAX_STARTS} starts")

    def finish(self) -> None:
        """Once more, undisturbed, with what has failed."""
        process = self._start(retry="failed")
        code = process.wait(timeout=COMMAND_TIMEOUT_S)
        self.verdict.exits[code] += 1
        if code not in (EXIT_OK, EXIT_STAGE_FAILED):
            self.verdict.faults.append(f"undisturbed, the batch ends with {code}: {self.log()}")

    def judge(self, expected: dict[str, Pixels]) -> Verdict:
        """Compare what is there with what has to be.

        Args:
            expected: Pixels of each good row's picture, by its id.
        """
        found = {row.id: row for row in results.read(self.output / results.NAME)}
        for row in self.rows:
            fault = self._fault(row, found.get(row.id), expected.get(row.id))
            if fault:
                self.verdict.faults.append(f"row {row.id}: {fault}")
        named = {found[row.id].file for row in self.rows if row.id in found} - {None}
        there = {p.relative_to(self.output).as_posix() for p in self.output.rglob("*.png")}
        if named != there:
            self.verdict.faults.append(f"files and results differ: {sorted(named ^ there)[:5]}")
        if left := [path.name for path in self.output.iterdir() if ".tmp-" in path.name]:
            self.verdict.faults.append(f"left in the folder: {left}")
        self._count_work(found)
        for pid in worker_processes(self.victim):
            os.kill(pid, signal.SIGTERM)
        if processes := self.victim.leftovers(within_s=30.0):
            self.verdict.faults.append(f"processes left: {processes}")
        report = ArtifactStore(self.disk / "store").verify_all()
        if not report.is_intact:
            self.verdict.faults.append(f"the store is not intact: {report}")
        return self.verdict

    def log(self) -> str:
        """The end of what the commands have told."""
        return (self.folder / "log.txt").read_text()[-1500:]

    # ---- blows -----------------------------------------------------------------------------

    def _start(self, **more: str) -> subprocess.Popen[bytes]:
        parameters = self._parameters | more
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                self._deployed(parameters) if self._is_deployed else _command(parameters),
                env=self.victim.environ,
                cwd=Path(__file__).resolve().parents[2],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _deployed(self, parameters: dict[str, Any]) -> list[str]:
        path = self.folder / "parameters.json"
        path.write_text(json.dumps(parameters))
        return [sys.executable, "-m", "tests.support.deployed_batch", str(path)]

    def _strike(self, target: str, process: subprocess.Popen[bytes]) -> bool:
        if target == "disk":
            with full_disk(self.disk):
                _ends_within(process, FULL_DISK_S)
            return True
        pids = {
            "flow": lambda: self._flow_processes(process),
            "worker": lambda: worker_processes(self.victim),
            "server": self.victim.servers,
            "child": self.victim.stage_processes,
        }[target]()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def _flow_processes(self, process: subprocess.Popen[bytes]) -> list[int]:
        if self._is_deployed:
            return flow_processes(self.victim)
        return [process.pid] if process.poll() is None else []

    def stop(self) -> None:
        """Kill what serves the batch: the last word on a home that goes away."""
        for pid in worker_processes(self.victim):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.victim.stop_server()

    # ---- judgement -------------------------------------------------------------------------

    def _fault(self, row: Row, found: RowResult | None, pixels: Pixels | None) -> str:
        if found is None:
            return "has no result"
        if found.status != row.status:
            return f"is {found.status}, has to be {row.status}: {found.error}"
        if row.reason not in (found.error or ""):
            return f"says {found.error!r}, which has to hold {row.reason!r}"
        if row.status != "done":
            return "" if found.file is None else f"has the file {found.file}"
        if pixels is None or not np.array_equal(read_pixels(self.output / str(found.file)), pixels):
            return f"{found.file} has not the undisturbed pixels"
        return ""

    def _count_work(self, found: dict[str, RowResult]) -> None:
        begun = Counter(self._begun.read_text().splitlines())
        poison = {
            f"{stage} {digest}"
            for row in self.rows
            if row.status == "failed" and row.id in found
            for stage, digest in found[row.id].requests.items()
        }
        self.verdict.begun = begun.total()
        self.verdict.again = sum(n - 1 for line, n in begun.items() if line not in poison)
        blows = self.verdict.hits.total()
        if self.verdict.again > blows:
            self.verdict.faults.append(
                f"{self.verdict.again} requests were begun again, {blows} blows fell"
            )


def undisturbed(
    model: Path, table: Sequence[Row], *, edge: int, num_steps: int, num_threads: int
) -> dict[str, Pixels]:
    """Each good row's pixels, painted in this process without stages, flows or a store.

    Args:
        edge: Pixels of both edges.
    """
    import diffusers
    import torch

    from stages.components import component_names, renew_job_state
    from stages.decode import encode_png

    torch.set_num_threads(num_threads)
    pipe = diffusers.ZImageModularPipeline(pretrained_model_name_or_path=str(model))
    pipe.load_components(names=component_names(pipe), dtype={"default": torch.float32})
    pipe.set_progress_bar_config(disable=True)
    found = {}
    for row in table:
        if row.status != "done":
            continue
        renew_job_state(pipe, {"guider": 1.0})
        images = pipe(
            prompt=row.cells["prompt"],
            max_sequence_length=512,
            height=edge,
            width=edge,
            num_inference_steps=num_steps,
            output_type="pt",
            generator=torch.Generator("cpu").manual_seed(row.cells["seed"]),
            output="images",
        )
        found[row.id] = read_pixels(BytesIO(encode_png(images[0])))
    return found


def _command(parameters: dict[str, Any]) -> list[str]:
    options = parameters["arguments"] | parameters
    del options["arguments"]
    table = options.pop("table")
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return [
        sys.executable,
        "-m",
        "flows",
        "batch",
        table,
        *(each for pair in pairs for each in pair),
    ]


def read_pixels(path: Path | BytesIO) -> Pixels:
    """A picture's pixels."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A disk of its own, in memory; takes root."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """While open, the disk of `folder` has no room."""
    path = folder / "everything"
    try:
        with path.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True

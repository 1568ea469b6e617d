"""Kill a run somewhere, run the same command again, and look at what is left.

One round paints one picture that was never painted before, sends SIGKILL to a stage process,
the flow process or the Prefect server at a random instant, and then gives the command again
until it succeeds. It checks that finished stages are not redone, that nothing half-written is
read, that the picture's bits are those of an undisturbed run, and that no process stays.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts import ArtifactStore

TARGETS = ("child", "flow", "server")
MAX_TRIES = 4
COMMAND_TIMEOUT_S = 180


@dataclass
class Round:
    """What happened in one round.

    Attributes:
        target: What was to be killed.
        delay_s: Seconds to the kill from the command's start, or from its first stage process
            where a child is the target.
        was_hit: Whether a process was there to be killed.
        num_tries: How often the command was given, the killed one included.
        finished_before: Stages whose result was recorded at the kill.
        redone: Stages of those that a later command did again; has to be empty.
    """

    target: str
    delay_s: float
    was_hit: bool
    num_tries: int
    finished_before: list[str]
    redone: list[str]
    faults: list[str] = field(default_factory=list)


class Victim:
    """Runs the command in one home, again and again, and kills parts of it."""

    def __init__(self, home: Path, model: Path, environ: dict[str, str] | None = None) -> None:
        self.home, self.model, self.output = home, model, home.parent / "pictures"
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "EXEUNT_"))
        }
        self.environ = keep | {"EXEUNT_HOME": str(home)} | (environ or {})

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "store")

    def start(self, seed: int, *more: str) -> subprocess.Popen[str]:
        """Give the command; its events come as JSON lines on its standard output."""
        command = [sys.executable, "-m", "flows", "z-image", "--json", "--prompt", "a red circle"]
        command += ["--model", str(self.model), "--seed", str(seed), "--output", str(self.output)]
        return subprocess.Popen(
            [*command, *more],
            env=self.environ,
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
        """Wait for a command; its exit code, its last event and its standard error."""
        out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        last = {}
        if lines:
            with suppress(ValueError):  # a killed process may leave half a line
                last = json.loads(lines[-1])
        return process.returncode, last, err

    def recorded(self) -> dict[str, set[str]]:
        """Request digests that have a record, by stage."""
        folder = self.home / "store" / "records"
        return {
            stage.name: {path.stem for path in stage.rglob("*.json")}
            for stage in (folder.iterdir() if folder.is_dir() else ())
        }

    def processes(self) -> dict[int, list[str]]:
        """Command lines of the living processes that were started for this home."""
        mark = f"EXEUNT_HOME={self.home}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                if mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    line = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = [
                        part.decode(errors="replace") for part in line if part
                    ]
        return found

    def servers(self) -> list[int]:
        """Process ids of the embedded Prefect server."""
        return [
            pid for pid, line in self.processes().items() if "prefect" in line and "server" in line
        ]

    def media_servers(self) -> list[int]:
        """Process ids of the server of pictures, which stays as long as the embedded server."""
        return [pid for pid, line in self.processes().items() if "flows.media_server" in line]

    def stage_processes(self) -> list[int]:
        """Process ids of fork server children and spawned stages."""
        servers = [pid for pid, line in self.processes().items() if "stages.forkserver" in line]
        children = []
        for server in servers:
            for task in Path(f"/proc/{server}/task").glob("*/children"):
                with suppress(OSError):
                    children += [int(pid) for pid in task.read_text().split()]
        return children

    def wait_for_stage_process(self, process: subprocess.Popen[str]) -> None:
        """Return when a stage process of the command runs, or the command has ended."""
        while process.poll() is None and not self.stage_processes():
            time.sleep(0.005)

    def stop_server(self) -> None:
        """Kill the embedded server, and the pictures' one: the last word on a home that goes."""
        for pid in [*self.servers(), *self.media_servers()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leftovers(self, within_s: float = 5.0) -> list[list[str]]:
        """Processes of ours other than the servers that are still there after a grace."""
        deadline = time.monotonic() + within_s
        while True:
            servers = {*self.servers(), *self.media_servers()}
            left = [line for pid, line in self.processes().items() if pid not in servers]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def play(victim: Victim, seed: int, target: str, delay_s: float, expected: bytes) -> Round:
    """Play one round.

    Args:
        expected: The PNG that an undisturbed run makes of this seed.
    """
    before = victim.recorded()
    process = victim.start(seed)
    if target == "child":
        victim.wait_for_stage_process(process)
    time.sleep(delay_s)
    finished = {
        stage: digests - before.get(stage, set()) for stage, digests in victim.recorded().items()
    }
    was_hit = _kill(victim, target, process)
    code, last, err = victim.finish(process)
    made: list[str] = list(last.get("made", {}))
    num_tries = 1
    faults: list[str] = []
    while code != 0 and num_tries < MAX_TRIES:
        num_tries += 1
        code, last, err = victim.finish(victim.start(seed))
        made = list(last.get("made", {}))
    if code != 0:
        faults.append(f"the command still fails after {num_tries} tries: {err[-800:]}")
    elif victim.store.read(picture_ref(last, victim)) != expected:
        faults.append("the picture's bits differ from the undisturbed run's")
    if left := victim.leftovers():
        faults.append(f"processes left: {left}")
    report = victim.store.verify_all()  # reads every object whole
    if not report.is_intact:
        faults.append(f"the store is not intact: {report}")
    done = sorted(stage for stage, digests in finished.items() if digests)
    redone = sorted(set(done) & set(made)) if num_tries > 1 else []
    if redone:
        faults.append(f"finished stages were done again: {redone}")
    return Round(target, round(delay_s, 3), was_hit, num_tries, done, redone, faults)


def _kill(victim: Victim, target: str, process: subprocess.Popen[str]) -> bool:
    match target:
        case "flow":
            pids = [process.pid] if process.poll() is None else []
        case "server":
            pids = victim.servers()
        case _:
            pids = victim.stage_processes()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def picture_ref(last: dict[str, Any], victim: Victim) -> Any:
    """The picture in the store that a command's last event names."""
    from stages.contracts import ArtifactRef

    digest = last["pictures"][0]["digest"]
    path = victim.home / "store" / "objects" / "sha256" / digest[:2] / digest
    return ArtifactRef(digest=digest, size=path.stat().st_size, media_type="image/png")


def undisturbed(victim: Victim, seeds: list[int]) -> dict[int, bytes]:
    """Each seed's PNG, painted in this process without stages, flows or a store."""
    import torch

    from stages.decode import encode_png
    from stages.families import family_named
    from tests.support.whole_run import run_whole

    own = (
        json.loads((victim.model / "exeunt.json").read_text())
        if (victim.model / "exeunt.json").exists()
        else {}
    )
    side = json.loads((victim.model / "vae" / "config.json").read_text())["sample_size"]
    scale = float(own.get("guidance_scale", 1.0))
    pictures = {}
    for seed in seeds:
        images = run_whole(
            family_named("z-image"),
            victim.model,
            {
                "prompt": "a red circle",
                "negative_prompt": "" if scale > 1 else None,
                "max_sequence_length": 512,
                "height": side,
                "width": side,
                "num_inference_steps": int(own.get("num_inference_steps", 8)),
                "output_type": "pt",
            },
            seed=seed,
            dtype=torch.float32,
            guidance={"guider": scale},
        )
        pictures[seed] = encode_png(images[0])
    return pictures


def schedule(
    num_rounds: int, command_s: float, stages_s: float, seed: int
) -> list[tuple[str, float]]:
    """Targets in turn, each with a random instant.

    Args:
        command_s: Seconds of an undisturbed command; flow and server die somewhere in it.
        stages_s: Seconds from its first stage process to its last; a child dies in those.
    """
    draw = random.Random(seed)
    targets = [TARGETS[number % len(TARGETS)] for number in range(num_rounds)]
    return [
        (target, draw.uniform(0.0, stages_s if target == "child" else command_s))
        for target in targets
    ]

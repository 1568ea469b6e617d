"""The chain on a GPU: right pictures, quick processes, memory that comes back, a clean parent.

usage: python -m tests.benchmarks.gpu_chain [--out DIR]

Prints one JSON document: verdicts of the judge on four pictures; seconds from the birth of a
stage process to its first request and to its first CUDA result; the device's memory in use
before, during and after; which processes ever mapped the CUDA driver; and whether what the fork
server imports has initialised it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from stages.media import read_settings
from stages.miniature.captions import parse
from tests.support.judge import judge

PROMPTS = (
    "a large red circle on a white background",
    "a small green star above a large blue square on a yellow background",
    "to the left of a purple triangle there is an orange circle, white background",
    "a large yellow square below a small red triangle on a black background",
)
DRIVER = "libcuda.so"
PRELOADED = """
from stages import forkserver, worker
from stages.cuda_state import is_cuda_initialised
from stages.preload import preload_names
worker.prepare_environment()
forkserver.preload(preload_names("z-image"))
print(int(is_cuda_initialised()))
print(forkserver.foreign_threads())
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-pictures"))
    parser.add_argument("--probes", type=int, default=10)
    parser.add_argument("--cpu", action="store_true", help="paint on the CPU too and compare")
    options = parser.parse_args()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": smi("name")}
    found["fork_server"] = preloaded()
    found["processes"] = probe(options.probes)
    with tempfile.TemporaryDirectory(prefix="exeunt-gpu-") as folder:
        environ = os.environ | {"EXEUNT_HOME": f"{folder}/home"}
        try:
            found["cuda"] = paint(environ, options.out, "--device", "cuda")
            if options.cpu:
                cpu = Path(folder) / "cpu"
                found["cpu"] = paint(environ, cpu, "--device", "cpu", "--fresh")
                found["largest_difference_cpu_cuda"] = difference(options.out, cpu)
        finally:
            subprocess.run([*exeunt(), "down"], env=environ, check=False, capture_output=True)
    print(json.dumps(found, indent=1))


def preloaded() -> dict[str, Any]:
    """What the fork server's imports leave behind in a process."""
    is_initialised, threads = subprocess.run(
        [sys.executable, "-c", PRELOADED], check=True, capture_output=True, text=True
    ).stdout.splitlines()[-2:]
    return {
        "is_cuda_initialised": bool(int(is_initialised)),
        "threads_in_the_way": threads,
    }


def exeunt() -> list[str]:
    """The command."""
    return [sys.executable, "-m", "flows"]


def paint(environ: dict[str, str], out: Path, *arguments: str) -> dict[str, Any]:
    """Paint the four prompts, watching the processes and the device."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [*exeunt(), "z-image", *prompts, "--seed", "7", "--output", str(out), "--json"]
    before = memory_in_use()
    watch = Watch()
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch.start(process.pid)
    assert process.stdout is not None
    after_phase = {}
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "phase_ends":
            after_phase[event["stage"]] = memory_in_use() - before
    assert process.stderr is not None
    errors = process.stderr.read()
    code = process.wait()
    elapsed_s = time.perf_counter() - start
    watch.stop()
    verdicts = {
        prompt: list(judge(picture, parse(prompt)).problems) or "right"
        for prompt, picture in pictures(out).items()
    }
    reports = [
        json.loads(path.read_text())
        for path in Path(environ["EXEUNT_HOME"], "reports").rglob("*.json")
    ]
    return {
        "exit_code": code,
        "stderr_tail": errors[-600:] if code else "",
        "elapsed_s": round(elapsed_s, 2),
        "verdicts": verdicts,
        "device_bytes_before": before,
        "device_bytes_left_after_phase": after_phase,
        "device_bytes_peak": watch.peak_bytes - before,
        "driver_mapped_by": sorted(watch.mapped_by),
        "watched": sorted(watch.seen),
        "stage_s": {
            f"{each['stage']} {each['device']}": each["elapsed_s"]
            for each in sorted(reports, key=lambda each: each["started_at"])
        },
    }


def pictures(folder: Path) -> dict[str, Image.Image]:
    """Each picture by the prompt inside it."""
    return {read_settings(path).prompt: Image.open(path) for path in folder.glob("*.png")}


def difference(one: Path, other: Path) -> int:
    """The largest difference of a colour level between two folders of pictures."""
    import numpy as np

    ours, theirs = pictures(one), pictures(other)
    return max(
        int(np.abs(np.asarray(ours[each], int) - np.asarray(theirs[each], int)).max())
        for each in ours
    )


class Watch:
    """Looks, every few milliseconds, at a process and those it starts."""

    def __init__(self) -> None:
        self.mapped_by: set[str] = set()
        self.seen: set[str] = set()
        self.peak_bytes = 0
        self._is_running = True
        self._thread: threading.Thread | None = None

    def start(self, pid: int) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End looking."""
        self._is_running = False
        if self._thread is not None:
            self._thread.join()

    def _look(self, pid: int) -> None:
        while self._is_running:
            self._look_at("flow", pid)
            for child in children(pid):
                is_server = "stages.forkserver" in command(child)
                self._look_at("fork server" if is_server else "other child", child)
                for grandchild in children(child) if is_server else ():
                    self._look_at("stage process", grandchild)
            self.peak_bytes = max(self.peak_bytes, memory_in_use())
            time.sleep(0.02)

    def _look_at(self, name: str, pid: int) -> None:
        with suppress(OSError):
            self.seen.add(name)
            if DRIVER in Path(f"/proc/{pid}/maps").read_text():
                self.mapped_by.add(name)


def children(pid: int) -> list[int]:
    """Direct children of a process, whichever of its threads made them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(each) for each in task.read_text().split()]
    return found


def command(pid: int) -> str:
    """A process's command line."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def probe(count: int) -> dict[str, Any]:
    """Seconds from birth to request and to first CUDA result, of `count` fresh processes."""
    from flows.launch import Launcher
    from flows.session import StageSession
    from stages.contracts import StageContext, StageRequest

    request = StageRequest.model_validate(
        {"stage": "denoise", "code_version": "0", "family": "z-image", "task": "", "dtype": ""}
    )
    before = memory_in_use()
    rows, left = [], []
    with tempfile.TemporaryDirectory() as folder:
        context = StageContext(model_dir=folder, store_url=folder, home_dir=folder, device="cuda")
        environ = {"EXEUNT_STAGE_HANDLERS": "tests.support.gpu_probe"}
        with Launcher("forkserver", environ=environ) as launcher:
            launcher.expect("z-image")
            for _ in range(count + 1):
                ready: list[float] = []
                start = time.perf_counter()
                with StageSession(
                    "denoise",
                    launcher,
                    on_event=lambda event, ready=ready: (  # type: ignore[misc]
                        ready.append(event.elapsed_s) if event.kind == "ready" else None
                    ),
                ) as session:
                    _, report = session.run(request, context)
                    answered_s = time.perf_counter() - start
                rows.append({**report, "ready_s": ready[0], "answered_s": answered_s})
                left.append(memory_in_use() - before)
    later = rows[1:]
    return {
        "count": count,
        "ready_s": summary([row["ready_s"] for row in later]),
        "first_cuda_s": summary([row["first_cuda_s"] for row in later]),
        "answered_s": summary([row["answered_s"] for row in later]),
        "device_bytes_left_after_exit": left,
    }


def summary(values: list[float]) -> dict[str, float]:
    """Least, median and greatest."""
    return {
        "min": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "max": round(max(values), 4),
    }


def memory_in_use() -> int:
    """Bytes in use on the device, by the driver's own account; this process makes no CUDA call."""
    return int(smi("memory.used")) * 1024**2


_nvml: Any = None


def smi(field: str) -> str:
    """One field of the first device, through the management library."""
    global _nvml  # noqa: PLW0603 - the library is opened once
    if _nvml is None:
        import pynvml

        pynvml.nvmlInit()
        _nvml = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
    library, handle = _nvml
    if field == "name":
        return str(library.nvmlDeviceGetName(handle))
    return str(library.nvmlDeviceGetMemoryInfo(handle).used // 1024**2)


if __name__ == "__main__":
    main()

"""`exeunt doctor`: measures what this machine can do, and says what is wrong with it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.file_rate import measure_file_rate
from flows.host_memory import host_memory_limit_bytes
from flows.machine import keep_rates
from flows.prefect_profile import PROFILE, user_settings
from flows.services import status
from flows.settings import Home, RunSettings
from stages.artifacts import ArtifactStore
from stages.errors import StageError

SCHEMA = "exeunt.doctor/1"
PROBE_TIMEOUT_S = 180.0
GPU_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def examine(settings: RunSettings, folder: Path | None = None) -> dict[str, Any]:
    """Look at everything and measure what can be measured; what is wrong is under `problems`.

    Args:
        folder: Where files are read for a rate; by default the home.

    Measured rates are kept in the home for `exeunt plan`. Blocks for some seconds.
    """
    problems: list[str] = []
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "host": platform.node(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "device": settings.device,
        "gpu_device_file": next((str(f) for f in GPU_DEVICE_FILES if f.exists()), None),
    }
    probe = run_probe(settings.device)
    problems += probe.pop("problems")
    found |= probe
    if found["memory"] is not None:
        found["memory"]["limit_bytes"] = host_memory_limit_bytes()
    found["home"] = _home(settings.home, problems)
    found["store"] = _store(settings.store_url, problems)
    found["file"] = _file(folder or settings.home.root, problems, is_asked=folder is not None)
    found["prefect"] = _prefect(settings.home, problems)
    found["problems"] = problems
    found["kept_in"] = _keep(settings.home, found) if found["home"]["is_writable"] else None
    return found


def run_probe(device: str) -> dict[str, Any]:
    """What `stages.machine_probe` says, in a process that a driver's crash takes along alone."""
    nothing = dict.fromkeys(("memory", "driver", "native", "torch", "gpu", "rates"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "stages.machine_probe", device],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"the probe of device {device} gave no answer within {PROBE_TIMEOUT_S:g} s"
        return {**nothing, "problems": [f"{problem}; see whether the device hangs"]}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        problem = f"the probe of device {device} ended with code {done.returncode}: {last}"
        return {**nothing, "problems": [problem]}
    return dict(found)


def _home(home: Home, problems: list[str]) -> dict[str, Any]:
    """Whether files can be written below the home; it is made if it is not there."""
    try:
        home.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home.root) as file:
            file.write(b"x")
            file.flush()
        stats = os.statvfs(home.root)
    except OSError as error:
        problems.append(
            f"home {home.root} cannot be written: {error.strerror}; set EXEUNT_HOME to a folder "
            "of yours"
        )
        return {"path": str(home.root), "is_writable": False, "free_bytes": None}
    free = stats.f_bavail * stats.f_frsize
    return {"path": str(home.root), "is_writable": True, "free_bytes": free}


def _store(url: str, problems: list[str]) -> dict[str, Any]:
    try:
        ArtifactStore(url).check_writable()
    except (StageError, OSError, ImportError) as error:
        problems.append(f"store {url}: {error}")
        return {"url": url, "is_writable": False}
    return {"url": url, "is_writable": True}


def _file(folder: Path, problems: list[str], *, is_asked: bool) -> dict[str, Any] | None:
    try:
        return asdict(measure_file_rate(folder))
    except OSError as error:
        if is_asked:  # of the home it was said already
            problems.append(f"no file of {folder} can be read: {error.strerror or error}")
        return None


def _prefect(home: Home, problems: list[str]) -> dict[str, Any]:
    """The server that a run would use, and what of the shipped settings the user has changed."""
    try:
        found = status(home).to_json()
    except StageError as error:
        problems.append(f"Prefect: {error}")
        return {"mode": None, "api_url": None, "is_healthy": False, "overridden": {}}
    if found["mode"] == "configured" and not found["is_healthy"]:
        problems.append(
            f"the Prefect server {found['api_url']} does not answer; start it, or unset "
            "PREFECT_API_URL to use a local one"
        )
    user = user_settings()
    found["overridden"] = {n: user[n] for n in PROFILE if n in user and user[n] != PROFILE[n]}
    return found


def _keep(home: Home, found: dict[str, Any]) -> str | None:
    rates, gpu, file = found["rates"], found["gpu"], found["file"]
    figures: dict[str, Any] = {"disk_bytes_per_s": file and file["first_bytes_per_s"]}
    if rates is not None and gpu is not None:
        figures |= {
            "link_bytes_per_s": rates["pinned_bytes_per_s"],
            "flops_per_s": rates["flops_per_s"],
            "device_bytes": gpu["total_bytes"],
            "device_name": gpu["name"],
        }
    if not any(figures.values()):
        return None
    return str(keep_rates(home, figures | {"measured_at": datetime.now(UTC).isoformat()}))

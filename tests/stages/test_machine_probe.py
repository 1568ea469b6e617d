"""What the probe says of a machine, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.machine_probe import driver_version


def probe(device: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "stages.machine_probe", device],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_cpu_is_looked_at_without_torch() -> None:
    found = probe("cpu")
    assert found["torch"] is found["gpu"] is found["rates"] is None
    assert found["problems"] == []
    assert isinstance(found["memory"], dict) and found["memory"]["available_bytes"] > 0
    assert isinstance(found["native"], dict) and "is_available" in found["native"]


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device")
def test_a_gpu_is_measured() -> None:
    found = probe("cuda")
    assert found["problems"] == []
    assert isinstance(found["rates"], dict) and found["rates"]["pinned_bytes_per_s"] > 0
    assert isinstance(found["gpu"], dict) and found["gpu"]["total_bytes"] > 0
    assert found["driver"]


def test_the_drivers_version_is_that_of_its_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert driver_version(path) is None
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    assert driver_version(path) == "580.159.03"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86  Fri\n")
    assert driver_version(path) == "535.86"
    path.write_text("nothing of the kind\n")
    assert driver_version(path) is None

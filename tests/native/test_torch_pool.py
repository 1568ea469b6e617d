"""torch in the arena's pool: fragmentation, and allocator settings from elsewhere. GPU only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OPEN = """
import gc, torch
from ddo.backend import NativeBackend, torch_memory
MIB = 1 << 20
torch.cuda.init()
backend = NativeBackend.on_cuda(
    torch.device("cuda", 0), limit_bytes=1024 * MIB, host_budget_bytes=MIB
)
def block(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
"""

SCATTERED = """
with torch_memory(backend):
    sizes = [(1, 2, 4, 8, 16, 32, 64)[n % 7] for n in range(54)]
    held = [block(mib) for mib in sizes]
    del held[::2]
    half = block(sum(sizes[::2]) // 2)
    half.fill_(3)
    print(int(half[-1]), backend.arena.stats().used_bytes <= 1024 * MIB)
"""

GROWING = """
with torch_memory(backend):
    for mib in range(100, 900, 10):
        block(mib)
    print(backend.arena.stats().used_bytes <= 1.2 * 890 * MIB)
"""

SMALL = """
import torch
from ddo.attaching import open_device
from ddo.settings import OffloadSettings
opened = open_device("cuda", OffloadSettings(device_budget="256MiB"))
with opened.memory():
    print(int(torch.ones(1000, device="cuda").sum()), opened.fallback_reason)
"""


torch_keeps_segments = pytest.mark.xfail(
    reason="torch 2.11 gave no cached segment of a pool in use back before it ran out of memory",
    strict=False,
)


def run(program: str, setting: str = "") -> subprocess.CompletedProcess[str]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.gpu
@torch_keeps_segments
def test_half_of_what_scattered_tensors_gave_back_can_be_one_tensor() -> None:
    """Cached segments of the pool have to be given back, and the request tried again."""
    result = run(OPEN + SCATTERED)
    assert (result.returncode, result.stdout.strip()) == (0, "3 True"), result.stderr


@pytest.mark.gpu
@torch_keeps_segments
def test_growing_tensors_hold_no_more_than_the_largest() -> None:
    result = run(OPEN + GROWING)
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["backend:cudaMallocAsync", "max_split_size_mb:x"])
def test_a_setting_that_cannot_be_served_is_one_error_and_no_crash(setting: str) -> None:
    """Either torch refuses its variable, or memory comes from it and the reason is told.

    What is no setting at all ends the process that imports torch 2.11, by an uncaught C++
    exception; a run refuses it before (`flows.settings`).
    """
    result = run(SMALL, setting)
    if result.returncode == 0:
        assert result.stdout.startswith("1000 ")
        assert ("cudamallocasync" in result.stdout) == ("cudaMallocAsync" in setting)
    else:
        assert result.returncode == 1, result.stderr
        assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr

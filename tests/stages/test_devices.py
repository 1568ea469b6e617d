"""A device that is not there is named before anything is loaded for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.devices import require_device, why_no_cuda
from stages.errors import DependencyError
from stages.models import MINIATURE
from tests.support.chain import context, request, run_stage


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
def test_a_stage_on_a_machine_without_a_gpu_says_so(tmp_path: Path, stage: str) -> None:
    where = context(MINIATURE, tmp_path, device="cuda")
    with pytest.raises(DependencyError, match=r"device cuda was asked for: .*device cpu"):
        run_stage(request(stage, {}), where)


@pytest.mark.parametrize(
    ("count", "device", "known"),
    [(1, "cuda:1", "sees cuda:0; choose"), (4, "cuda:4", "sees cuda:0 to cuda:3; choose")],
)
def test_a_number_beyond_the_last_gpu_is_told_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, count: int, device: str, known: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    require_device("cuda")
    require_device(f"cuda:{count - 1}")
    with pytest.raises(DependencyError, match=known):
        require_device(device)


def test_the_cpu_is_always_there() -> None:
    require_device("cpu")


def test_a_driver_that_says_why_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no usable CUDA device: too old; check the driver" in why_no_cuda("too old")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in why_no_cuda("too old")

"""A device that is not there is named before anything is loaded for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactStore
from stages.devices import require_device, why_no_cuda
from stages.errors import DependencyError
from stages.handover import unpack
from stages.models import MINIATURE
from stages.safetensors_header import read_header
from tests.support import tiny_models
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


def test_an_artifact_says_nothing_of_the_device_that_it_was_made_on(tmp_path: Path) -> None:
    """Whatever device there is reads it: the stage says where its tensors go."""
    where = context(tiny_models.z_image(tmp_path / "model"), tmp_path)
    text = {"prompt": "a fox", "max_sequence_length": 64}
    loop = {"height": 64, "width": 64, "num_inference_steps": 1}
    embeds = run_stage(request("encode", text), where)[0]
    latents, report, _ = run_stage(request("denoise", loop, embeds, seed=1), where)
    store = ArtifactStore(where.store_url)

    headers = [
        str(read_header(store.path(ref)).raw)
        for result in (embeds, latents)
        for ref in result.artifacts.values()
    ]

    assert len(headers) >= 2
    assert not [header for header in headers if "cpu" in header or "device" in header]
    moved = unpack(store.path(latents.artifacts["latents"]), "meta").handover.values["latents"]
    assert moved.device.type == "meta"
    assert "cpu" in str(report)

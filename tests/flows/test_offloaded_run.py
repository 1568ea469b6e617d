"""A whole run whose models stream, in real stage processes, on a fake device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("native", reason="the native extension is not built")
pytestmark = pytest.mark.usefixtures("prefect_server")

SAID: dict[str, Any] = {
    "prompt": "a large red circle on a white background",
    "seed": 3,
    "num_images": 2,
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "device": "cpu",
}
MODELS = {"encode": "text_encoder", "denoise": "transformer", "decode": "vae"}


@pytest.fixture(params=["forkserver", "spawn"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Stage processes of each kind, on a fake device from the second run on."""
    from flows.launch import shared_launcher

    monkeypatch.setenv("EXEUNT_LAUNCH", request.param)
    shared_launcher.cache_clear()
    yield request.param
    shared_launcher(request.param).close()
    shared_launcher.cache_clear()


def paint(folder: Path, **said: Any) -> list[np.ndarray[Any, Any]]:
    from flows.z_image import z_image

    pictures = z_image(**SAID | {"output": str(folder)} | said)
    return [np.asarray(Image.open(picture.path)) for picture in pictures]


def test_streamed_pictures_are_those_of_the_cpu_and_the_reports_tell_how(
    launched: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.launch import shared_launcher

    expected = paint(tmp_path / "plain")
    shared_launcher(launched).close()
    shared_launcher.cache_clear()
    before = set((home / "reports").rglob("*.json"))
    monkeypatch.setitem(os.environ, "EXEUNT_STAGE_HANDLERS", "tests.support.fake_gpu")
    monkeypatch.setenv("DDO_LINK_RATE", "1GB")
    streamed = paint(tmp_path / "streamed", offload="low_memory", device_budget="32MiB", fresh=True)
    assert all(np.array_equal(a, b) for a, b in zip(expected, streamed, strict=True))
    new = sorted(set((home / "reports").rglob("*.json")) - before)
    reports = [json.loads(path.read_text()) for path in new]
    told = [(r["stage"], r["offload"]) for r in reports if r["stage"] in MODELS]
    assert [stage for stage, _ in told] == ["encode", "denoise", "denoise", "decode", "decode"]
    for stage, offload in told:
        assert offload["preset"] == "low_memory" and offload["device_budget"] == 32 << 20
        found = offload["components"][MODELS[stage]]
        assert found["plan"]["mode"] == "stream" and found["ring"]["num_copies"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("preset", ["auto", "stream", "low_memory", "group"])
def test_on_a_gpu_a_run_with_a_small_budget_paints_the_same(
    home: Path, tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.launch import shared_launcher

    said = {"device": "cuda", "height": 128, "width": 128, "guidance_scale": 3.0}
    shared_launcher.cache_clear()
    try:
        expected = paint(tmp_path / "off", offload="off", **said)
        before = set((home / "reports").rglob("*.json"))
        monkeypatch.setenv("DDO_RESERVE", "380MiB")  # 4 MiB for weights
        small = paint(tmp_path / preset, offload=preset, device_budget="384MiB", fresh=True, **said)
    finally:
        shared_launcher("forkserver").close()
        shared_launcher.cache_clear()
    assert all(np.array_equal(a, b) for a, b in zip(expected, small, strict=True))
    for path in set((home / "reports").rglob("*-denoise.json")) - before:
        found = json.loads(path.read_text())["offload"]["components"]["transformer"]
        assert found["plan"]["mode"] == ("group" if preset == "group" else "stream")

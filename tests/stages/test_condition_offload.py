"""Pictures encoded while the VAE's weights stream: equal bits, whatever the preset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("native", reason="the native extension is not built")

from stages import offload
from stages.contracts import OffloadChoice, StageContext
from stages.models import MINIATURE
from tests.support.chain import context, run_stage
from tests.support.fake_gpu import FakeDevices
from tests.support.kept_pipes import drop_kept
from tests.support.picture_tasks import TASKS, PictureTask, chain

RESERVE = 8 << 10  # bytes
STREAMED = {
    "flux image-to-image",
    "flux2-klein edit",
    "qwen-image inpaint",
    "sd3 image-to-image",
    "sdxl inpaint",
    "z-image image-to-image",
}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Every test begins and ends as a fresh process does."""
    drop_kept()
    yield
    drop_kept()


def conditioned(task: PictureTask, where: StageContext) -> tuple[Any, dict[str, Any]]:
    result, report, _ = run_stage(task.request(where, "condition"), where)
    return result, report


@pytest.mark.parametrize("name", sorted(STREAMED))
@pytest.mark.parametrize("preset", ["resident", "low_memory"])
def test_a_condition_has_the_same_bits_and_reports_how(
    name: str, preset: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS[name]
    expected, _ = conditioned(task, context(tiny(task.case), tmp_path / "plain"))
    drop_kept()
    fake = FakeDevices()
    monkeypatch.setattr(offload, "open_device", fake.open)
    monkeypatch.setattr(offload, "is_computed_in_place", lambda _: False)
    where = placed(tiny(task.case), tmp_path / "placed", preset)
    result, report = conditioned(task, where)
    assert result == expected
    assert fake.violations() == []
    found = report["offload"]["components"]["vae"]
    assert found["num_steps"] > 0
    assert found["plan"]["mode"] == ("stream" if preset == "low_memory" else "resident")
    assert (found["ring"]["num_copies"] > 0) == (preset == "low_memory")


def placed(model_dir: Path, root: Path, preset: Any) -> StageContext:
    """A context; one that streams has a budget that the VAE's weights do not fit in."""
    (weights,) = (model_dir / "vae").glob("*.safetensors")
    budget = weights.stat().st_size * 2 // 3 if preset == "low_memory" else None
    said = OffloadChoice(preset=preset, device_budget=budget, reserve=RESERVE, link_rate=10**9)
    return context(model_dir, root).model_copy(update={"offload": said})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_run_from_a_picture_makes_the_bits_of_a_model_that_is_all_there(
    tmp_path: Path,
) -> None:
    task = TASKS["z-image image-to-image"]

    def on_gpu(root: Path, **choice: Any) -> StageContext:
        said = OffloadChoice(**choice)
        return context(MINIATURE, root, device="cuda").model_copy(update={"offload": said})

    expected = chain(task, on_gpu(tmp_path / "off", preset="off"))
    drop_kept()
    small = on_gpu(tmp_path / "small", preset="stream", device_budget=256 << 20, reserve=254 << 20)
    assert chain(task, small) == expected

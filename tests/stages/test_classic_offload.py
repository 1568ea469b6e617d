"""Classic pipelines whose weights stream: the offloader's forward and the loop's get along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("native", reason="the native extension is not built")

from stages import offload
from stages.contracts import OffloadChoice, OffloadPreset, StageContext, StageRequest, StageResult
from stages.models import open_model
from tests.stages.test_checkpoints import kill
from tests.support.chain import context, request, run_stage
from tests.support.fake_gpu import FakeDevices
from tests.support.kept_pipes import drop_kept
from tests.support.tiny_families import CASES

# diffusers' schedulers hand torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

CASE = CASES["pixart"]
STAGES = {"encode": "text_encoder", "denoise": "transformer", "decode": "vae"}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Every test begins and ends as a fresh process does."""
    drop_kept()
    yield
    drop_kept()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> FakeDevices:
    found = FakeDevices()
    monkeypatch.setattr(offload, "open_device", found.open)
    monkeypatch.setattr(offload, "is_computed_in_place", lambda _: False)
    return found


def streaming(model: Path, root: Path, stage: str, preset: OffloadPreset) -> StageContext:
    """A context in which the stage's model does not fit on the device."""
    nbytes = open_model(model).components[STAGES[stage]].nbytes
    said = OffloadChoice(
        preset=preset, device_budget=nbytes * 4 // 5, reserve=nbytes // 20, link_rate=10**9
    )
    return context(model, root, checkpoint_every_steps=1).model_copy(update={"offload": said})


def asked(stage: str, *inputs: StageResult) -> StageRequest:
    seed = 7 if stage == "denoise" else None
    return request(stage, CASE.requests[stage], *inputs, family=CASE.name, seed=seed)


@pytest.mark.parametrize("preset", ["stream", "low_memory"])
def test_a_classic_pipeline_streams_and_resumes_with_equal_bits(
    tiny: Any, tmp_path: Path, devices: FakeDevices, preset: OffloadPreset
) -> None:
    plain: list[StageResult] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload, "is_computed_in_place", lambda _: True)
        for stage in STAGES:
            where = context(tiny(CASE), tmp_path / "plain")
            plain.append(run_stage(asked(stage, *plain[-1:]), where)[0])
    drop_kept()

    made: list[StageResult] = []
    for stage, name in STAGES.items():
        where = streaming(tiny(CASE), tmp_path / preset, stage, preset)
        if stage == "denoise":
            kill(asked(stage, *made[-1:]), where, 2)
        result, report, _ = run_stage(asked(stage, *made[-1:]), where)
        made.append(result)
        found = report["offload"]["components"][name]
        assert found["plan"]["mode"] == "stream" and found["ring"]["num_copies"] > 0
        if stage == "denoise":
            assert report["resumed_from_step"] == 2
    assert made == plain
    assert devices.violations() == []

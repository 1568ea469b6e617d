"""Stages whose weights stream: on a fake device that punishes every access out of order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("native", reason="the native extension is not built")

from ddo.settings import PRESETS
from stages import execute, offload
from stages.components import bind
from stages.contracts import OffloadChoice, StageContext, StageResult
from stages.errors import RequestError, StageFailed
from stages.families import family_named
from stages.forecasts import forecast_model
from stages.models import MINIATURE, open_model
from stages.offload import Placement
from stages.phases import split
from tests.ddo.modules import assert_same, make_net, photograph, run
from tests.support import tiny_models
from tests.support.chain import context, request, run_stage
from tests.support.fake_gpu import FakeDevices
from tests.support.kept_pipes import drop_kept

TEXT = {
    "prompt": "a small red fox",
    "negative_prompt": "blurry",
    "do_classifier_free_guidance": True,
    "max_sequence_length": 64,
}
LOOP = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 3.0}
BUDGETS = {"encode": 56 << 10, "denoise": 1320 << 10, "decode": 88 << 10}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.z_image(tmp_path_factory.mktemp("tiny") / "z-image")


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


def chain(where: StageContext, *, seed: int = 5) -> tuple[list[StageResult], dict[str, Any]]:
    """Encode, denoise and decode; the results and each stage's report."""
    results: list[StageResult] = []
    reports: dict[str, Any] = {}
    for stage, options in (("encode", TEXT), ("denoise", LOOP), ("decode", {})):
        asked = request(stage, options, *results[-1:], seed=seed if stage == "denoise" else None)
        result, reports[stage], _ = run_stage(asked, at(where, stage))
        results.append(result)
    return results, reports


def with_offload(model_dir: Path, root: Path, **choice: Any) -> StageContext:
    said = OffloadChoice(link_rate=10**9, **choice)
    return context(model_dir, root).model_copy(update={"offload": said})


@pytest.fixture
def plain(model_dir: Path, tmp_path: Path) -> list[StageResult]:
    """What the chain makes without any offload."""
    return chain(context(model_dir, tmp_path / "plain"))[0]


def at(where: StageContext, stage: str) -> StageContext:
    """The context with a budget that the weights of a stage's model do not fit in."""
    said = where.offload
    if said.preset not in ("stream", "low_memory") or said.device_budget is not None:
        return where
    tight = said.model_copy(update={"device_budget": BUDGETS[stage], "reserve": 8 << 10})
    return where.model_copy(update={"offload": tight})


@pytest.mark.parametrize("preset", ["auto", "resident", "stream", "low_memory"])
def test_every_stage_makes_the_same_bits_and_reports_how(
    model_dir: Path, tmp_path: Path, plain: list[StageResult], devices: FakeDevices, preset: str
) -> None:
    where = with_offload(model_dir, tmp_path / preset, preset=preset)
    results, reports = chain(where)
    assert results == plain
    assert devices.violations() == []
    streams = preset in ("stream", "low_memory")
    for stage, name in (("encode", "text_encoder"), ("denoise", "transformer"), ("decode", "vae")):
        told = reports[stage]["offload"]
        assert told["preset"] == preset
        found = told["components"][name]
        assert found["num_steps"] > 0
        assert found["plan"]["mode"] in (["stream"] if streams else ["resident"])
        assert (found["ring"]["num_copies"] > 0) == streams
        assert found["own_memory_bytes"] == 0, "a copy of the weights in host memory"
        assert [f for f in found["fallbacks"] if f["what"] == "source"] == []


def test_a_session_lives_through_all_requests_of_a_process(
    model_dir: Path, tmp_path: Path, devices: FakeDevices
) -> None:
    where = with_offload(model_dir, tmp_path, preset="low_memory")
    embeds = run_stage(request("encode", TEXT), at(where, "encode"))[0]
    where = at(where, "denoise")
    first = run_stage(request("denoise", LOOP, embeds, seed=1), where)
    num_opened = len(devices.drivers)
    other = run_stage(request("denoise", LOOP, embeds, seed=2), where)
    again = run_stage(request("denoise", LOOP, embeds, seed=1), where)
    assert len(devices.drivers) == num_opened
    assert again[0] == first[0] != other[0]
    reports = [made[1]["offload"]["components"]["transformer"] for made in (first, other, again)]
    assert reports[0]["num_steps"] < reports[1]["num_steps"] < reports[2]["num_steps"]
    assert "blocks" in reports[0]["plan"] and "blocks" not in reports[1]["plan"]
    assert reports[0]["plan"]["num_blocks"] == reports[2]["plan"]["num_blocks"] > 0
    assert "place" in [phase["name"] for phase in first[1]["host_phases"]]
    assert "place" not in [phase["name"] for phase in other[1]["host_phases"]]
    assert devices.violations() == []


def test_tiles_stream_as_well(model_dir: Path, tmp_path: Path, devices: FakeDevices) -> None:
    """Every tile goes through the decoder once more, within one step of the session."""
    large = {**LOOP, "height": 160, "width": 128, "guidance_scale": 1.0}
    mapped = context(model_dir, tmp_path / "plain")
    off = mapped.model_copy(update={"offload": OffloadChoice(preset="off")})
    embeds = run_stage(request("encode", TEXT), off)[0]
    latents = run_stage(request("denoise", large, embeds, seed=1), off)[0]
    tiled = request("decode", {"tiling": True}, latents)
    expected = run_stage(tiled, off)[0]
    where = with_offload(model_dir, tmp_path / "plain", preset="low_memory")
    result, report, _ = run_stage(tiled, at(where, "decode"))
    assert result == expected
    assert report["offload"]["components"]["vae"]["ring"]["num_copies"] > 0
    assert devices.violations() == []


def test_after_an_error_in_the_middle_of_a_step_the_process_serves_the_next_request(
    model_dir: Path, tmp_path: Path, devices: FakeDevices
) -> None:
    where = with_offload(model_dir, tmp_path, preset="low_memory")
    embeds = run_stage(request("encode", TEXT), at(where, "encode"))[0]
    where = at(where, "denoise")
    asked = request("denoise", LOOP, embeds, seed=1)
    expected = run_stage(asked, where)[0]
    transformer = execute._KEPT[0].pipe.transformer
    layer = list(transformer.layers)[-1]

    def fail(*_: object) -> None:
        raise RuntimeError("the layer broke")

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the layer broke"):
        run_stage(asked, where)
    hook.remove()
    assert run_stage(asked, where)[0] == expected
    assert devices.violations() == []


def test_another_choice_in_one_process_attaches_anew(
    model_dir: Path, tmp_path: Path, devices: FakeDevices
) -> None:
    where = with_offload(model_dir, tmp_path, preset="low_memory")
    asked = request("encode", TEXT)
    expected = run_stage(asked, at(where, "encode"))[0]
    model = execute._KEPT[0].pipe.text_encoder
    resident = with_offload(model_dir, tmp_path, preset="resident")
    result, report, _ = run_stage(asked, resident)
    assert result == expected
    assert report["offload"]["components"]["text_encoder"]["plan"]["mode"] == "resident"
    assert all(not vars(child).get("_forward_pre_hooks") for child in model.modules())


def test_off_moves_the_models_and_attaches_nothing(
    model_dir: Path, tmp_path: Path, plain: list[StageResult], devices: FakeDevices
) -> None:
    results, reports = chain(with_offload(model_dir, tmp_path / "off", preset="off"))
    assert results == plain
    assert devices.drivers == []
    told = reports["denoise"]["offload"]
    assert (told["preset"], told["components"]) == ("off", {})


def test_diffusers_group_offload_makes_the_same_bits(
    model_dir: Path, tmp_path: Path, plain: list[StageResult], devices: FakeDevices
) -> None:
    results, reports = chain(with_offload(model_dir, tmp_path / "group", preset="group"))
    assert results == plain
    for report in reports.values():
        (found,) = report["offload"]["components"].values()
        assert found["plan"]["mode"] == "group"


def test_on_the_cpu_nothing_is_attached_and_ddo_stays_out(model_dir: Path, tmp_path: Path) -> None:
    where = with_offload(model_dir, tmp_path, preset="stream", device_budget=1 << 20)
    _, report, _ = run_stage(request("encode", TEXT), where)
    assert report["offload"]["components"] == {}


def test_a_budget_that_no_plan_fits_is_the_users_error_and_can_be_put_right(
    model_dir: Path, tmp_path: Path, devices: FakeDevices
) -> None:
    asked = request("encode", TEXT)
    tight = with_offload(model_dir, tmp_path, preset="stream", device_budget=4096, reserve=4095)
    with pytest.raises(RequestError, match=r"component 'text_encoder' .* raise device_budget"):
        run_stage(asked, tight)
    with pytest.raises(RequestError, match="raise device_budget"):
        run_stage(asked, tight)
    run_stage(asked, with_offload(model_dir, tmp_path, preset="auto"))


def test_a_component_that_cannot_be_attached_fails_the_stage_by_name(
    model_dir: Path, tmp_path: Path, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddo.blocks import NotOwnable

    def refuse(*_: object, **__: object) -> None:
        raise NotOwnable("weights are compiled")

    monkeypatch.setattr("ddo.attach", refuse, raising=False)
    with pytest.raises(StageFailed, match="'text_encoder' cannot be offloaded: weights are"):
        run_stage(request("encode", TEXT), with_offload(model_dir, tmp_path))


class Pipe:
    """Two models and something that is none."""

    def __init__(self, **components: Any) -> None:
        self.components = {**components, "scheduler": object()}


def test_two_models_of_one_phase_share_one_budget(tmp_path: Path, devices: FakeDevices) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    large = make_net(folders[0], width=64)
    small = make_net(folders[1], seed=1, width=64, depth=1)
    expected = [run(large), run(small)]
    before = [photograph(large), photograph(small)]
    budget = 480 << 10
    placement = Placement(
        "cpu",
        OffloadChoice(preset="auto", device_budget=budget, reserve=8 << 10, link_rate=10**9),
    )
    placement.place(Pipe(small=small, large=large), {})
    assert sum(devices.limits) <= budget
    with placement.memory():
        for _ in range(3):
            assert torch.equal(run(large), expected[0])
            assert torch.equal(run(small), expected[1])
    assert set(placement.report()["components"]) == {"small", "large"}
    placement.detach()
    placement.detach()
    for model, photo in zip((large, small), before, strict=True):
        assert_same(photo, photograph(model))
    assert devices.violations() == []


def test_a_phase_without_models_has_nothing_to_place(devices: FakeDevices) -> None:
    placement = Placement("cpu", OffloadChoice(link_rate=10**9))
    placement.place(Pipe(), {})
    assert placement.report()["components"] == {}


def test_the_pipeline_answers_for_where_it_computes(devices: FakeDevices, tmp_path: Path) -> None:
    """By itself it would ask the first weight, which may be in host memory."""

    class Asking(Pipe):
        device = torch.device("meta")

    pipe = Asking(net=make_net(tmp_path))
    placement = Placement("cpu", OffloadChoice(link_rate=10**9))
    placement.place(pipe, {})
    assert pipe.device == torch.device("cpu")
    assert isinstance(pipe, Asking)
    assert type(pipe).__name__ == "Asking"
    placement.detach()


def test_the_presets_are_those_of_ddo() -> None:
    for preset in PRESETS:
        assert OffloadChoice(preset=preset).preset == preset  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="preset"):
        OffloadChoice(preset="fast")  # type: ignore[arg-type]


def test_offload_is_no_part_of_a_requests_key(model_dir: Path, tmp_path: Path) -> None:
    assert "offload" not in request("denoise", LOOP).model_dump()


@pytest.mark.parametrize("preset", ["auto", "stream", "low_memory"])
@pytest.mark.parametrize("budget_mib", [3, 6])
def test_a_forecast_from_headers_is_the_plan_of_the_session(
    devices: FakeDevices, preset: str, budget_mib: int
) -> None:
    """Headers do not tell which layers are used by others, so ring sizes may differ a little."""
    choice = OffloadChoice(
        preset=preset,  # type: ignore[arg-type]
        device_budget=budget_mib << 20,
        reserve=1 << 20,
        link_rate=10**9,
    )
    forecasts = {c.component: c for c in forecast_model(MINIATURE, choice=choice).components}
    for phase, name in (("encode", "text_encoder"), ("denoise", "transformer"), ("decode", "vae")):
        pipe = bind(
            split(family_named("z-image"), "text-to-image"),
            phase,
            MINIATURE,
            dtype=torch.float32,
            device="cpu",
        )
        placement = Placement("cpu", choice)
        placement.place(pipe, open_model(MINIATURE).components)
        planned = placement.report()["components"][name]["plan"]
        placement.detach()
        assert forecasts[name].mode == planned["mode"]
        expected = pytest.approx(planned["device_bytes"], rel=0.1)
        assert forecasts[name].weights_on_device_bytes == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("preset", ["stream", "low_memory"])
def test_on_a_gpu_a_small_budget_makes_the_bits_of_a_model_that_is_all_there(
    tmp_path: Path, preset: str
) -> None:
    def on_gpu(root: Path, **choice: Any) -> StageContext:
        said = OffloadChoice(**choice)
        return context(MINIATURE, root, device="cuda").model_copy(update={"offload": said})

    expected, _ = chain(on_gpu(tmp_path / "off", preset="off"))
    small = on_gpu(tmp_path / preset, preset=preset, device_budget=256 << 20, reserve=254 << 20)
    results, reports = chain(small)
    for report in reports.values():
        for found in report["offload"]["components"].values():
            assert found["backend"] in ("native", "torch")
            assert found["plan"]["device_bytes"] <= 256 << 20  # what the work left is used too
            assert found["pins"]["pageable_bytes"] == 0
    assert results == expected
    free, _ = torch.cuda.mem_get_info()
    drop_kept()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


class Moved:
    """A pipeline that notes where it is moved."""

    def __init__(self) -> None:
        self.components = {"transformer": torch.nn.Linear(256, 256)}  # 257 KiB in float32
        self.devices: list[str] = []

    def to(self, device: str) -> None:
        self.devices.append(device)


@pytest.mark.parametrize(
    ("choice", "free_nbytes", "is_moved"),
    [
        ({}, 2 << 20, True),
        ({}, 1 << 20, False),
        ({"device_budget": 1 << 20}, 2 << 20, False),
        ({"preset": "stream"}, 2 << 20, False),
        ({"preset": "off"}, 1 << 20, True),
    ],
)
def test_weights_that_fit_with_ease_are_moved_whole(
    monkeypatch: pytest.MonkeyPatch, choice: dict[str, Any], free_nbytes: int, is_moved: bool
) -> None:
    attached: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_nbytes, free_nbytes))
    monkeypatch.setattr(Placement, "_attach", lambda self, models, _: attached.extend(models))
    monkeypatch.setattr(offload, "_tell_device", lambda *_: None)
    pipe, placement = Moved(), Placement("cuda", OffloadChoice(**choice))
    placement._attached = {
        "": SimpleNamespace(opened=SimpleNamespace(backend=SimpleNamespace(device=None)))
    }  # type: ignore[dict-item]
    placement.place(pipe, {})
    assert pipe.devices == (["cuda"] if is_moved else [])
    assert attached == ([] if is_moved else ["transformer"])


def test_the_report_tells_of_weights_that_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    placement = Placement("cuda", OffloadChoice())
    placement.place(Moved(), {})
    assert placement.report()["components"] == {}
    assert "were moved there" in placement.report()["note"]

"""A forecast comes from headers alone, says what it assumes, and agrees with what happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages.activations import sequence_activation_bytes, vae_activation_bytes
from stages.contracts import OffloadChoice
from stages.errors import ModelError, RequestError
from stages.forecast_records import ComponentForecast, ModelForecast, Rates
from stages.forecasts import forecast_model
from stages.models import MINIATURE
from tests.support import header_models
from tests.support.chain import context, request, run_stage

GIB = 1 << 30
RATES = Rates(link_bytes_per_s=50e9, flops_per_s=400e12, disk_bytes_per_s=2e9, source="measured")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return header_models.z_image(tmp_path_factory.mktemp("headers") / "z-image")


def ask(model: Path, budget: int | None = None, **options: Any) -> ModelForecast:
    choice = OffloadChoice(preset=options.pop("preset", "auto"), device_budget=budget)
    return forecast_model(model, choice=choice, **{"rates": RATES, **options})


def part(found: ModelForecast, name: str) -> ComponentForecast:
    return next(each for each in found.components if each.component == name)


def test_components_come_in_the_order_of_their_phases(model: Path) -> None:
    found = ask(model)
    assert [(each.phase, each.component) for each in found.components] == [
        ("encode", "text_encoder"),
        ("denoise", "transformer"),
        ("decode", "vae"),
    ]
    assert found.fits and all(each.mode == "resident" for each in found.components)
    assert found.device_bytes == max(each.device_bytes for each in found.components)


def test_a_small_budget_streams_what_does_not_fit_and_holds(model: Path) -> None:
    found = ask(model, 8 * GIB)
    transformer = part(found, "transformer")
    assert (transformer.mode, part(found, "vae").mode) == ("stream", "resident")
    assert transformer.weights_on_device_bytes < 6 * GIB < transformer.disk_bytes
    assert found.fits and found.device_bytes <= 8 * GIB


def test_time_is_computation_and_the_first_copy_of_what_stays(model: Path) -> None:
    found = part(ask(model, num_inference_steps=10), "transformer")
    assert found.num_steps == 10
    assert found.elapsed_s is not None and found.step_s is not None
    first_copy_s = found.weights_on_device_bytes / 50e9
    assert found.elapsed_s == pytest.approx(first_copy_s + 10 * found.step_s)
    tokens = 512 + (1024 // 16) ** 2
    attention = 4 * tokens**2 * 3840 * 32
    assert found.step_s == pytest.approx((found.disk_bytes * tokens + attention) / 400e12, rel=0.02)
    assert found.read_s == pytest.approx(found.disk_bytes / 2e9)


def test_more_pixels_and_guidance_take_more_of_everything(model: Path) -> None:
    small, large = ask(model), ask(model, height=2048, width=2048)
    guided = ask(model, guidance_scale=4.0)
    for name in ("transformer", "vae"):
        assert part(large, name).activation_bytes > part(small, name).activation_bytes
    times = [part(each, "transformer").step_s or 0 for each in (small, large)]
    assert times[1] > 3 * times[0]
    assert part(guided, "transformer").num_steps == 2 * part(small, "transformer").num_steps
    assert part(guided, "transformer").device_bytes == part(small, "transformer").device_bytes
    assert part(guided, "text_encoder").num_steps == 2


def test_a_budget_that_no_plan_fits_is_told_for_that_component(model: Path) -> None:
    found = ask(model, 600 << 20)
    assert not found.fits
    encoder = part(found, "text_encoder")
    assert encoder.mode == "" and "raise device_budget" in encoder.problem
    assert found.elapsed_s is None
    assert "work exceed the device budget of 600.0 MiB" in part(found, "vae").problem


def test_a_converted_dtype_takes_memory_of_its_own(model: Path) -> None:
    plain, wide = ask(model), ask(model, dtype="float32")
    assert {each.anonymous_bytes for each in plain.components} == {0}
    for each in wide.components:
        assert each.anonymous_bytes == 2 * each.disk_bytes
        assert each.weights_on_device_bytes > part(plain, each.component).disk_bytes


def test_what_was_not_measured_is_said_to_be_assumed(model: Path) -> None:
    notes = "\n".join(ask(model, rates=Rates()).notes)
    assert "link: 25 GB/s is assumed" in notes and "computation: 100 TFLOP/s is assumed" in notes
    assert "no device budget was given" in notes
    known = ask(model, rates=Rates(device_bytes=24 * GIB, link_bytes_per_s=5e10, source="here"))
    assert known.device_budget == 24 * GIB
    assert "link: 50 GB/s (here)" in known.notes


def test_it_is_json_with_a_schema(model: Path) -> None:
    document = json.loads(json.dumps(ask(model, 8 * GIB).to_json()))
    assert document["schema"] == "exeunt.forecast/1"
    assert document["fits"] is True and document["components"][1]["fits"] is True


@pytest.mark.parametrize("preset", ["group", "off"])
def test_a_preset_that_plans_nothing_is_refused(model: Path, preset: str) -> None:
    with pytest.raises(RequestError, match="choose auto, resident, stream or low_memory"):
        ask(model, preset=preset)


def test_bad_directories_and_sizes_are_clear_errors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model directory is missing"):
        ask(tmp_path / "nothing")
    with pytest.raises(RequestError, match="height 1000 is not a multiple of 16"):
        ask(model, height=1000)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match=r"transformer|text_encoder|vae"):
        ask(copy)
    index = json.loads((copy / "model_index.json").read_text())
    del index["vae"]
    for name in ("transformer", "text_encoder"):
        for file in (model / name).glob("*.safetensors"):
            (copy / name / file.name).symlink_to(file)
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no VAE with weights"):
        ask(copy)


# ---- estimates, held against what torch does ------------------------------------------------


LONG = "a large red circle on a white background, " * 20  # longer than its encoder reads
OPTIONS: dict[str, dict[str, Any]] = {
    "encode": {"prompt": LONG, "max_sequence_length": 64},
    "denoise": {"num_inference_steps": 1},
    "decode": {},
}


@pytest.mark.parametrize("side", [128, 256])
def test_the_peak_of_each_phase_is_within_15_percent_of_the_measured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """Measured as what torch allocates on a CPU, beside the weights, which stay mapped."""
    from stages import execute

    peaks: list[int] = []
    run_phase = execute.run_phase

    def measured(*arguments: Any, **options: Any) -> Any:
        with allocations() as found:
            made = run_phase(*arguments, **options)
        peaks.append(found[0])
        return made

    where, results = context(MINIATURE, tmp_path), list[Any]()
    monkeypatch.setattr(execute, "run_phase", measured)
    for stage, options in OPTIONS.items():
        size = {"height": side, "width": side} if stage == "denoise" else {}
        asked = request(stage, options | size, *results[-1:], seed=1 if size else None)
        results.append(run_stage(asked, where)[0])
    forecast = forecast_model(MINIATURE, height=side, width=side, max_sequence_length=64)
    for each, peak in zip(forecast.components, peaks, strict=True):
        measured_bytes = each.weights_on_device_bytes + peak
        assert each.device_bytes == pytest.approx(measured_bytes, rel=0.15), each.component


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Afterwards holds the most bytes that were allocated inside and alive at a time."""
    import torch

    found: list[int] = []
    with torch.profiler.profile(profile_memory=True) as profile:
        yield found
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    found.append(peak)


def test_a_gated_layer_holds_four_copies_of_its_width_and_an_embedding_none() -> None:
    plain = {"embed.weight": (50_000, 64), "l.0.up.weight": (256, 64), "l.0.down.weight": (64, 256)}
    plain |= {"l.0.q.weight": (64, 64), "l.0.k.weight": (64, 64), "time.weight": (4096, 16)}
    gated = plain | {"l.0.gate.weight": (256, 64)}
    assert sequence_activation_bytes(plain, 10, 2) == (2 * 256 + 3 * 64) * 10 * 2
    assert sequence_activation_bytes(gated, 10, 2) == (4 * 256 + 3 * 64) * 10 * 2
    kept = sequence_activation_bytes(gated, 10, 2, num_kept_states=5)
    assert kept - sequence_activation_bytes(gated, 10, 2) == 5 * 64 * 10 * 2
    assert sequence_activation_bytes({"norm.weight": (64,)}, 10, 2) == 0


def test_a_decoder_whose_configuration_is_silent_is_taken_for_a_usual_one() -> None:
    usual = {"block_out_channels": [128, 256, 512, 512]}
    assert vae_activation_bytes({}, 64, 64, 2) == vae_activation_bytes(usual, 64, 64, 2)
    assert vae_activation_bytes({"block_out_channels": [8]}, 1, 1, 1) == 8 + 4 * 8

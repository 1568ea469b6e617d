from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from ddo.forecasting import forecast, header_blocks
from ddo.planning import PlanError
from ddo.settings import OffloadSettings, SettingsError
from ddo.weight_files import read_weight_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve layers of 64 x 256 in half precision."""
    path = tmp_path_factory.mktemp("weights")
    state = {f"layers.{k}.up.weight": torch.zeros(256, 64).half() for k in range(12)}
    save_file(state, path / "model.safetensors")
    return path


def ask(folder, budget, **options):
    settings = OffloadSettings(device_budget=budget, reserve=1024, link_rate="1GB")
    return forecast(folder, settings, num_tokens=10, num_steps=4, **options)


def test_layers_are_taken_in_the_order_of_their_numbers(folder):
    names = [block.name for block in header_blocks(read_weight_files(folder))]
    assert names == [f"layers.{k}.up" for k in range(12)]


def test_what_fits_is_resident_and_computation_decides(folder):
    found = ask(folder, 2 << 20, flops_per_s=1e9)
    assert found.plan.mode == "resident"
    assert found.weight_bytes == 12 * 256 * 64 * 2
    assert found.step_s == pytest.approx(2 * 12 * 256 * 64 * 10 / 1e9)
    assert found.denoise_s == pytest.approx(4 * found.step_s)
    assert found.fits


def test_what_does_not_fit_streams_at_the_rate_of_the_link(folder):
    found = ask(folder, 200_000, flops_per_s=1e15)
    assert found.plan.mode == "stream"
    assert found.step_s >= found.plan.streamed_bytes / 1e9
    assert found.plan.device_bytes <= 200_000


def test_weights_whose_dtype_is_converted_take_memory_of_their_own(folder):
    plain, found = ask(folder, 2 << 20), ask(folder, 2 << 20, dtype="F32")
    assert (plain.converted_bytes, found.converted_bytes) == (0, 12 * 256 * 64 * 4)
    assert found.weight_bytes == 2 * plain.weight_bytes
    assert found.plan.device_bytes == 2 * plain.plan.device_bytes
    assert found.activation_bytes == 2 * plain.activation_bytes
    assert ask(folder, 2 << 20, dtype="F16") == plain


def test_activations_that_exceed_the_budget_are_told(folder):
    settings = OffloadSettings(device_budget=200_000, reserve=1024)
    assert not forecast(folder, settings, num_tokens=1000).fits


def test_without_a_rate_of_computation_times_are_left_open(folder):
    found = ask(folder, 200_000)
    assert found.step_s is None
    assert any("left open" in note for note in found.notes)


def test_a_budget_that_no_plan_fits_names_the_need(folder):
    with pytest.raises(PlanError, match=r"at least 32.0 KiB"):
        ask(folder, 20_000)
    with pytest.raises(SettingsError, match="device_budget is not set"):
        forecast(folder, OffloadSettings(), num_tokens=1)


def test_a_forecast_needs_no_torch(folder):
    code = (
        "import json, sys; from ddo.forecasting import forecast; "
        "from ddo.settings import OffloadSettings; "
        f"found = forecast({str(folder)!r}, OffloadSettings(device_budget='1GiB'), num_tokens=9); "
        "assert 'torch' not in sys.modules; print(json.dumps(found.to_json()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(run.stdout)
    assert document["schema"] == 1
    assert document["plan"]["mode"] == "resident"

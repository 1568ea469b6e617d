"""Offload as arguments of a flow: checked with all others, kept out of every key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.z_image import check
from stages.contracts import OffloadChoice
from stages.errors import RequestError

SAID: dict[str, Any] = {
    "prompt": "a fox",
    "negative_prompt": "",
    "seed": 1,
    "num_images": 1,
    "height": None,
    "width": None,
    "num_inference_steps": None,
    "guidance_scale": None,
    "max_sequence_length": 64,
    "model": "miniature",
    "dtype": "auto",
    "device": "cuda",
}


@pytest.fixture
def said(home: Path, tmp_path: Path) -> dict[str, Any]:
    return SAID | {"output": str(tmp_path / "pictures")}


def test_the_arguments_reach_the_stages_context(said: dict[str, Any]) -> None:
    from flows.run import Run

    job = check(**said, offload="stream", device_budget="2GiB", host_budget=1 << 30)
    assert job.offload == OffloadChoice(preset="stream", device_budget=2 << 30, host_budget=1 << 30)
    assert job.warnings == ()
    run = Run(
        family="z-image",
        task="text-to-image",
        model=job.model,
        model_name="m",
        dtype=job.dtype,
        device=job.device,
        offload=job.offload,
    )
    assert run.context.offload == job.offload


def test_variables_stand_in_for_arguments(
    said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDO_PRESET", "low_memory")
    assert check(**said).offload.preset == "low_memory"
    assert check(**said, offload="auto").offload.preset == "auto"


def test_a_wrong_budget_is_an_error_before_anything_starts(said: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="device_budget: 'twelve' is no amount of memory"):
        check(**said, device_budget="twelve")


def test_on_the_cpu_the_run_goes_on_with_a_warning(said: dict[str, Any]) -> None:
    (warning,) = check(**(said | {"device": "cpu"}), offload="stream").warnings
    assert "offload has no effect on device cpu" in warning


def test_a_run_that_says_nothing_loads_nothing_of_ddo(said: dict[str, Any]) -> None:
    code = (
        f"import sys; from flows.z_image import check; check(**{said!r}); "
        "print([name for name in ('ddo', 'torch', 'native') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

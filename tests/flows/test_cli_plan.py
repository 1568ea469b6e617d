"""`exeunt plan`: no torch, no GPU, no Prefect; a table for people, JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.machine import keep_rates, kept_rates, machine_path
from flows.settings import Home
from stages.errors import RequestError
from stages.forecast_records import Rates
from tests.support import header_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return header_models.z_image(tmp_path_factory.mktemp("headers") / "z-image")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_table_names_every_phase_and_every_assumption(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = plan(capsys, str(model), "--device-budget", "8GiB", "--width", "768")
    assert code == 0
    lines = out.splitlines()
    assert "768 x 1024 pixels, 8 steps, bfloat16, preset auto, device budget 8.00 GiB" in lines[0]
    assert lines[1].split() == [
        *("phase", "component", "plan", "device", "pinned", "anonymous", "disk", "step", "time")
    ]
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["encode", "text_encoder", "stream"],
        ["denoise", "transformer", "stream"],
        ["decode", "vae", "resident"],
    ]
    assert any("is assumed" in line for line in lines)
    assert not home.exists(), "planning writes nothing"


def test_json_is_one_document(model: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        capsys, str(model), "--json", "--link-rate", "50GB", "--tflops", "400",
        "--host-budget", "2GiB", "--offload", "low_memory", "--device-budget", "16GiB",
    )  # fmt: skip
    document = json.loads(out)
    assert code == 0 and document["preset"] == "low_memory"
    assert all(each["pinned_bytes"] <= 2 << 30 for each in document["components"])
    assert "link: 50 GB/s, as given" in document["notes"]


def test_a_plan_that_does_not_fit_says_what_would(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = plan(capsys, str(model), "--device-budget", "512MiB")
    assert code == 2
    assert "none fits" in out
    assert (
        "phase encode, text_encoder: weights need at least" in err and "raise device_budget" in err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent"], "model directory is missing: /nonexistent"),
        (["miniature", "--device-budget", "much"], "device_budget: 'much' is no amount of memory"),
        (["miniature", "--link-rate", "fast"], "link_rate: 'fast' is no amount of memory"),
        (["miniature", "--height", "100"], "height 100 is not a multiple of"),
        (["miniature", "--tflops", "-1"], "tflops is -1.0, expected a positive number"),
        (["miniature", "--dtype", "int8"], "dtype is 'int8', allowed are float32"),
    ],
)
def test_bad_input_is_a_clear_error(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = plan(capsys, *arguments)
    assert code == 2 and message in err


def test_the_budget_and_rates_that_the_doctor_measured_are_taken(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {
        "device_bytes": 10 << 30,
        "link_bytes_per_s": 12e9,
        "device_name": "Some GPU",
        "measured_at": "2026-11-30T10:00:00+00:00",
    }
    keep_rates(Home(root=home), figures)
    _, out, _ = plan(capsys, str(model), "--json")
    document = json.loads(out)
    assert document["device_budget"] == 10 << 30
    assert "link: 12 GB/s (measured on Some GPU 2026-11-30)" in document["notes"]


def test_kept_figures_are_completed_and_foreign_ones_ignored(home: Path) -> None:
    root = Home(root=home)
    assert kept_rates(root) == Rates()
    keep_rates(root, {"link_bytes_per_s": 1e9})
    keep_rates(root, {"disk_bytes_per_s": 2e9, "link_bytes_per_s": None})
    found = kept_rates(root)
    assert (found.link_bytes_per_s, found.disk_bytes_per_s) == (1e9, 2e9)
    for text in ("", "[]", "{", '{"schema": "other/1", "link_bytes_per_s": 5}'):
        machine_path(root).write_text(text)
        assert kept_rates(root) == Rates()
    schema = '{"schema": "exeunt.machine/1", "link_bytes_per_s": '
    for value in ('"fast"', "-1", "true", "NaN"):
        machine_path(root).write_text(f"{schema}{value}}}")
        assert kept_rates(root) == Rates()


def test_planning_loads_no_torch_and_no_prefect(model: Path, home: Path) -> None:
    code = (
        f"import sys; from flows.cli import main; main(['plan', {str(model)!r}]); "
        "print([n for n in ('torch', 'prefect', 'diffusers', 'native') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_model_of_videos_is_refused(tmp_path: Path) -> None:
    from flows.cli_plan import run
    from tests.support import tiny_videos

    model = tiny_videos.wan(tmp_path / "model")
    with pytest.raises(RequestError, match=r"makes videos \(wan\), but only pictures are forecast"):
        run("plan", [str(model)])

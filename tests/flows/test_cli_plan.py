"""`exeunt plan`: no torch, no GPU, no server; a table for people, JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.cli_plan import command_for
from flows.machine import keep_rates, kept_rates, machine_path
from flows.settings import Home
from stages.forecast_records import Rates
from tests.support import header_models
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES, VideoCase


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


def test_planning_loads_no_torch(model: Path, home: Path) -> None:
    code = (
        f"import sys; from flows.cli import main; main(['plan', {str(model)!r}]); "
        "print([n for n in ('torch', 'diffusers', 'native') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [*CASES, *VIDEO_CASES])
def test_each_model_is_planned_by_its_own_familys_command(name: str, tiny: Any) -> None:
    case: Case | VideoCase = {**CASES, **VIDEO_CASES}[name]
    assert command_for(str(tiny(case))) == (case.command or case.name)


def test_a_video_is_planned_with_its_familys_defaults(
    tiny: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny(VIDEO_CASES["wan22"]))
    code, out, _ = plan(capsys, model)
    assert code == 0
    assert ": wan22, text-to-video, 832 x 480 pixels x 81 frames, 40 steps" in out
    code, out, _ = plan(capsys, "wan", "--model", model, "--json", "--num-videos", "3",
        "--num-frames", "9", "--num-inference-steps", "20")  # fmt: skip
    document = json.loads(out)
    assert document["job"]["num_frames"] == 9 and document["num_outputs"] == 3
    calls = {c["component"]: c["num_steps"] for c in document["components"]}
    assert calls["transformer"] + calls["transformer_2"] == 2 * 20, "guidance asks twice"
    assert calls["text_encoder"] == 2, "a negative prompt is encoded, too"
    assert 2 * document["elapsed_s"] < document["run_s"] < 3 * document["elapsed_s"]


def test_a_picture_to_start_from_adds_the_condition_phase(
    tiny: Any, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny(VIDEO_CASES["wan-i2v from a picture"]))
    code, _, err = plan(capsys, model)
    assert code == 2 and "starts from a picture; give image" in err
    VIDEO_CASES["wan-i2v from a picture"].media["image"].save(tmp_path / "start.png")
    code, out, _ = plan(capsys, model, "--json", "--image", str(tmp_path / "start.png"))
    components = json.loads(out)["components"]
    assert code == 0
    assert [(c["phase"], c["component"]) for c in components if c["phase"] == "condition"] == [
        ("condition", "image_encoder"),
        ("condition", "vae"),
    ]


def test_the_familys_own_checks_hold(
    tiny: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny(VIDEO_CASES["wan"]))
    for arguments, message in (
        ([model, "--num-frames", "10"], "num_frames is 10, but this model's videos have 4k+1"),
        (["z-image", "--model", model], "but z-image takes ZImagePipeline"),
        ([model, "--offload", "off"], "offload is 'off', which plans nothing"),
    ):
        code, _, err = plan(capsys, *arguments)
        assert code == 2 and message in err

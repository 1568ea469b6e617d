"""`exeunt doctor`: every part is looked at, what is wrong is named, rates are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows import doctor
from flows.cli import main
from flows.file_rate import measure_file_rate
from flows.machine import kept_rates
from flows.settings import Home

GPU_PROBE = {
    "memory": {"available_bytes": 8 << 30, "limited_by": "MemAvailable"},
    "driver": "580.159.03",
    "native": {"is_available": True, "reason": ""},
    "torch": {"version": "2.13.0", "cuda": "13.0"},
    "gpu": {
        "name": "Some GPU",
        "compute_capability": [9, 0],
        "free_bytes": 10 << 30,
        "total_bytes": 12 << 30,
        "num_devices": 1,
        "granularity_bytes": 2 << 20,
        "has_read_only_registration": True,
    },
    "rates": {
        "pinned_bytes_per_s": 55e9,
        "pageable_bytes_per_s": 8.5e9,
        "flops_per_s": 600e12,
        "fallback_reason": None,
    },
}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    monkeypatch.setattr(doctor, "run_probe", lambda _: {**GPU_PROBE, "problems": []})
    return home


def consult(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_machine_without_a_gpu_is_nothing_wrong_and_the_rest_is_measured(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXEUNT_DEVICE", "cpu")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)  # of the test session's own server
    monkeypatch.setattr(doctor, "GPU_DEVICE_FILES", (tmp_path / "nothing",))
    code, out, err = consult(capsys, "--json")
    found = json.loads(out)
    assert (code, found["problems"], err) == (0, [], "")
    assert found["gpu"] is found["rates"] is None
    assert found["memory"]["available_bytes"] > 0 and found["memory"]["limit_bytes"] > 0
    assert found["file"]["first_bytes_per_s"] > 0
    assert found["home"]["is_writable"] and found["store"]["is_writable"]
    assert found["prefect"]["mode"] == "none"
    rates = kept_rates(Home(root=home))
    assert rates.disk_bytes_per_s == found["file"]["first_bytes_per_s"]
    assert rates.link_bytes_per_s is None
    assert {entry.name for entry in home.iterdir()} <= {"machines", "store"}, "files left behind"
    code, out, _ = consult(capsys)
    assert code == 0 and "no GPU: stages compute on the CPU" in out


def test_what_a_gpu_can_do_is_shown_and_kept_for_plans(
    on_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = consult(capsys)
    assert code == 0
    assert "Some GPU, compute capability 9.0, 10.00 GiB of 12.00 GiB free" in out
    assert "580.159.03" in out
    assert "available; the device can read weight files by itself" in out
    assert "55.00 GB/s from pinned memory, 8.50 GB/s from pageable memory" in out
    assert "600.0 TFLOP/s" in out
    rates = kept_rates(Home(root=on_gpu))
    assert (rates.link_bytes_per_s, rates.flops_per_s) == (55e9, 600e12)
    assert rates.device_bytes == 12 << 30 and rates.source.startswith("measured on Some GPU 20")
    assert main(["plan", "miniature", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device_budget"] == 12 << 30


def test_a_gpu_that_cannot_be_used_is_wrong(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU that works")
    code, _, err = consult(capsys, "--device", "cuda")
    assert code == 3
    assert "exeunt: error: torch" in err


def test_a_home_that_cannot_be_written_is_wrong(
    on_gpu: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEUNT_HOME", "/proc/nowhere")
    code, out, err = consult(capsys)
    assert code == 3
    assert "/proc/nowhere cannot be written" in out
    assert "set EXEUNT_HOME to a folder of yours" in err
    assert "store file:///proc/nowhere/store:" in err


def test_a_server_of_the_users_that_does_not_answer_is_wrong(
    on_gpu: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "10")
    code, out, err = consult(capsys)
    assert code == 3
    assert "http://127.0.0.1:9/api does not answer" in err
    assert "PREFECT_WORKER_QUERY_SECONDS=10" in out


def test_a_folder_that_cannot_be_read_is_wrong_if_it_was_asked_for(
    on_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = consult(capsys, "--directory", "/nonexistent")
    assert code == 3 and "no file of /nonexistent can be read" in err


def test_a_probe_that_dies_or_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], -11, stdout="", stderr="a\nSegmentation fault\n")

    monkeypatch.setattr(subprocess, "run", dies)
    (problem,) = doctor.run_probe("cuda")["problems"]
    assert problem == "the probe of device cuda ended with code -11: Segmentation fault"

    def hangs(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("probe", 180)

    monkeypatch.setattr(subprocess, "run", hangs)
    (problem,) = doctor.run_probe("cuda")["problems"]
    assert "gave no answer within 180 s" in problem


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_a_device_that_is_none_is_bad_input(
    home: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    code, _, err = consult(capsys, "--device", device)
    assert code == 2 and "allowed are cpu, cuda and cuda:N" in err


def test_the_largest_file_is_read_and_a_folder_of_small_ones_is_left_clean(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 1000)
    found = measure_file_rate(tmp_path)
    assert found.nbytes == 64 << 20 and found.first_bytes_per_s > 0 < found.again_bytes_per_s
    assert [entry.name for entry in tmp_path.iterdir()] == ["small"]
    (tmp_path / "large").write_bytes(b"x" * (9 << 20))
    with (tmp_path / "hole").open("wb") as hole:
        hole.truncate(1 << 30)
    found = measure_file_rate(tmp_path)
    assert (Path(found.path).name, found.nbytes) == ("large", 9 << 20)


def test_the_doctor_loads_no_torch_into_its_own_process(home: Path) -> None:
    code = (
        "import sys, flows.cli_doctor; "
        "print([n for n in ('torch', 'ddo', 'native', 'prefect') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Settings come from the environment alone, and each wrong one says what would be right."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.settings import Home, RunSettings, SettingsError


def test_an_empty_environment_gives_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("flows.settings._GPU_DEVICE_FILES", (tmp_path / "nothing",))
    settings = RunSettings.from_env({})
    home = tmp_path / ".local" / "share" / "exeunt"
    assert settings == RunSettings(
        home=Home(root=home), store_url=f"file://{home}/store", launch="forkserver", device="cpu"
    )
    assert not home.exists(), "reading settings creates nothing"


def test_the_device_is_a_gpu_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr("flows.settings._GPU_DEVICE_FILES", (tmp_path / "nvidiactl",))
    assert RunSettings.from_env({}).device == "cuda"
    assert RunSettings.from_env({"EXEUNT_DEVICE": "cpu"}).device == "cpu"


def test_xdg_data_home_moves_the_home_if_it_is_absolute(tmp_path: Path) -> None:
    assert RunSettings.from_env({"XDG_DATA_HOME": "/data"}).home.root == Path("/data/exeunt")
    relative = RunSettings.from_env({"XDG_DATA_HOME": "data"}).home.root
    assert relative == Path.home() / ".local/share/exeunt"


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = RunSettings.from_env(
        {
            "EXEUNT_HOME": f"{tmp_path}/a/../b",
            "EXEUNT_STORE": "s3://bucket/artifacts",
            "EXEUNT_LAUNCH": "spawn",
            "EXEUNT_DEVICE": "cuda:3",
            "EXEUNT_CHECKPOINT_EVERY_STEPS": "5",
            "EXEUNT_CHECKPOINT_EVERY_S": "1.5",
            "EXEUNT_PREVIEW_EVERY_STEPS": "4",
            "EXEUNT_ALLOW_URLS": "1",
        }
    )
    assert settings.allow_urls
    assert settings.home.root == tmp_path / "b"
    assert settings.home.prefect == tmp_path / "b" / "prefect"
    assert settings.home.locks == tmp_path / "b" / "locks"
    assert settings.store_url == "s3://bucket/artifacts"
    assert (settings.launch, settings.device) == ("spawn", "cuda:3")
    assert (settings.checkpoint_every_steps, settings.checkpoint_every_s) == (5, 1.5)
    assert (
        settings.preview_every_steps == 4 and RunSettings.from_env({}).preview_every_steps is None
    )


def test_checkpoints_can_be_had_by_time_by_steps_or_not_at_all() -> None:
    by_default = RunSettings.from_env({})
    assert (by_default.checkpoint_every_steps, by_default.checkpoint_every_s) == (None, 60.0)
    off = RunSettings.from_env({"EXEUNT_CHECKPOINT_EVERY_S": "off"})
    assert (off.checkpoint_every_steps, off.checkpoint_every_s) == (None, None)


def test_a_store_may_be_a_plain_folder(tmp_path: Path) -> None:
    assert RunSettings.from_env({"EXEUNT_STORE": "~/art"}).store_url == f"file://{Path.home()}/art"
    assert RunSettings.from_env({"EXEUNT_STORE": "/a b/c"}).store_url == "file:///a b/c"


def test_an_empty_variable_counts_as_unset() -> None:
    names = [f"EXEUNT_{name}" for name in ("HOME", "STORE", "LAUNCH", "DEVICE")]
    names += [
        "EXEUNT_ALLOW_URLS",
        "EXEUNT_CHECKPOINT_EVERY_STEPS",
        "EXEUNT_CHECKPOINT_EVERY_S",
        "EXEUNT_PREVIEW_EVERY_STEPS",
        "XDG_DATA_HOME",
    ]
    assert RunSettings.from_env(dict.fromkeys(names, "")) == RunSettings.from_env({})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EXEUNT_HOME", "data", "EXEUNT_HOME is 'data', a relative path; set it to an absolute"),
        ("EXEUNT_STORE", "store", "EXEUNT_STORE is 'store', a relative path"),
        ("EXEUNT_STORE", "file://store", "write file:///absolute/path"),
        ("EXEUNT_LAUNCH", "fork", "EXEUNT_LAUNCH is 'fork'; set it to forkserver or spawn"),
        ("EXEUNT_DEVICE", "gpu", "EXEUNT_DEVICE is 'gpu'; set it to cpu, cuda, or cuda:N"),
        ("EXEUNT_DEVICE", "cuda:01", "cuda:N such as cuda:0"),
        ("EXEUNT_DEVICE", "cuda:-1", "cuda:N such as cuda:0"),
        ("EXEUNT_DEVICE", "cpu\n", "EXEUNT_DEVICE is 'cpu\\n'"),
        ("EXEUNT_CHECKPOINT_EVERY_STEPS", "0", "is '0'; set it to a number of denoising steps, 1"),
        ("EXEUNT_CHECKPOINT_EVERY_STEPS", "2.5", "is '2.5'; set it to a number of denoising"),
        ("EXEUNT_PREVIEW_EVERY_STEPS", "-1", "is '-1'; set it to a number of denoising steps, 1"),
        ("EXEUNT_CHECKPOINT_EVERY_S", "0", "is '0'; set it to seconds over 0, such as 60, or off"),
        ("EXEUNT_CHECKPOINT_EVERY_S", "nan", "is 'nan'; set it to seconds over 0"),
        ("EXEUNT_CHECKPOINT_EVERY_S", "1 min", "is '1 min'; set it to seconds over 0"),
        ("EXEUNT_ALLOW_URLS", "yes", "EXEUNT_ALLOW_URLS is 'yes'; set it to 1 or 0"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage text", "'garbage text' is no setting; write name"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,x", "in which 'x' is no setting"),
        ("PYTORCH_ALLOC_CONF", "a:1,,b:2", "in which '' is no setting"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_ones(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        RunSettings.from_env({name: value})


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "expandable_segments:True",
        "backend:cudaMallocAsync, max_split_size_mb:128",
        "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8",
    ],
)
def test_settings_that_torch_can_read_pass(setting: str) -> None:
    RunSettings.from_env({"PYTORCH_CUDA_ALLOC_CONF": setting})


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="which is a file; name a folder"):
        RunSettings.from_env({"EXEUNT_HOME": str(tmp_path / "file")})


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunSettings.from_env({}).device = "cuda"  # type: ignore[misc]


def test_settings_load_neither_torch_nor_prefect() -> None:
    code = "import flows.settings, sys; print(sorted({'torch', 'prefect'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout == "[]\n"

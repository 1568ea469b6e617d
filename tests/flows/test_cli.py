"""The command: what it prints, and the exit code by which a caller knows what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.exit_codes import exit_code
from flows.prefect_api import ServerError
from stages import errors
from stages.artifacts import ArtifactStore
from stages.contracts import StageResult
from tests.support.chain import request


@pytest.fixture
def store(home: Path) -> ArtifactStore:
    """A store with one recorded artifact."""
    made = ArtifactStore(home / "store")
    ref = made.put(b'{"a": 1}', "application/json")
    made.record(request("inspect", {}), StageResult(stage="inspect", artifacts={"manifest": ref}))
    return made


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestError("x"), 2),
        (errors.ModelError("x"), 2),
        (errors.StageFailed("x"), 3),
        (errors.BorderError("x"), 3),
        (errors.StageCrashed("x"), 4),
        (errors.StageTimeout("x"), 4),
        (errors.StageOutOfMemory("x"), 4),
        (errors.ArtifactError("x"), 5),
        (errors.ArtifactMissing("x"), 5),
        (ServerError("x"), 6),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_every_command_and_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("z-image", "artifacts", "up", "down", "status", "prune", "130"):
        assert word in text


def test_an_unknown_command_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["paint"])
    assert caught.value.code == 2
    assert "z-image" in capsys.readouterr().err


def test_artifacts_are_listed_shown_and_verified(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    (held,) = json.loads(output(capsys, "artifacts", "ls", "--json"))
    assert held["media_type"] == "application/json" and held["stages"] == ["inspect"]
    assert held["digest"][:16] in output(capsys, "artifacts", "ls")
    assert '"a": 1' in output(capsys, "artifacts", "show", held["digest"][:8])
    assert "all intact" in output(capsys, "artifacts", "verify")


def test_a_damaged_artifact_is_reported_with_its_own_exit_code(
    store: ArtifactStore, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (home / "store" / "objects" / "sha256").glob("??/*")
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)
    assert "damaged" in output(capsys, "artifacts", "verify", code=5)


def test_collection_says_what_would_go_and_keeps_what_is_young(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(output(capsys, "artifacts", "gc", "--json"))
    assert kept["records"] == [] and kept["objects"] == []
    would = output(capsys, "artifacts", "gc", "--older-than-days", "0", "--dry-run")
    assert "would remove 1 records" in would
    assert len(store.ls()) == 1


def test_checkpoints_are_told_of_where_there_are_any(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unfinished" not in output(capsys, "artifacts", "ls")
    store.checkpoints(request("denoise", {})).write(4, b"latents")
    told = output(capsys, "artifacts", "ls")
    assert told.endswith("besides, 7 bytes in checkpoints of 1 unfinished denoises\n")
    assert "would remove 0 records, 0 artifacts, 0 checkpoints and 0 leftovers: 0 bytes" in output(
        capsys, "artifacts", "gc", "--dry-run"
    )


def test_an_unknown_digest_is_an_error_on_standard_error(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["artifacts", "show", "ffff"]) in (2, 5)
    assert "exeunt: error:" in capsys.readouterr().err


def test_status_of_a_fresh_home_starts_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = json.loads(output(capsys, "status", "--json"))
    assert found["mode"] == "none" and found["server_pid"] is None
    assert not home.exists()


def test_a_bad_setting_is_an_error_with_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEUNT_LAUNCH", "teleport")
    assert main(["artifacts", "ls"]) == 2
    assert "EXEUNT_LAUNCH" in capsys.readouterr().err


class Told:
    """Lines that a display printed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


def tell_everything(display: Any) -> None:
    display.phase_begins("denoise", 2)
    display.step("denoise", "a \x1b[31mfox", "running", 1, 4)
    display.request_ends("denoise", "a \x1b[31mfox", cached=False, elapsed_s=1.234)
    display.request_ends("denoise", "an owl", cached=True, elapsed_s=0.01)
    display.phase_ends("denoise")
    display.warn("prompt was cut")
    display.saved("/tmp/a.png")


def test_plain_lines_say_what_was_done_and_escape_control_characters() -> None:
    from flows.display import LineDisplay

    told = Told()
    tell_everything(LineDisplay(told))  # type: ignore[arg-type]
    lines = told.text.splitlines()
    assert "1/2" in lines[0] and "1.23 s" in lines[0] and "\x1b" not in told.text
    assert "2/2" in lines[1] and "cached" in lines[1]
    assert lines[2:] == ["warning: prompt was cut", "saved     /tmp/a.png"]


def test_json_lines_are_one_document_each() -> None:
    from flows.display import JsonDisplay, Tally

    told = Told()
    tally = Tally(JsonDisplay(told))  # type: ignore[arg-type]
    tell_everything(tally)
    events = [json.loads(line) for line in told.text.splitlines()]
    assert [event["event"] for event in events] == [
        *("phase_begins", "step", "request_ends", "request_ends"),
        *("phase_ends", "warn", "saved"),
    ]
    assert tally.made == {"denoise": 1} and tally.found == {"denoise": 1}


def test_the_live_display_draws_without_a_terminal_too() -> None:
    from flows.display import LiveDisplay

    told = Told()
    live = LiveDisplay(told)  # type: ignore[arg-type]
    with live.shown():
        tell_everything(live)
    assert "denoise" in told.text and "1 cached" in told.text
    assert "\x1b[31m" not in told.text


def test_a_hint_that_cannot_be_kept_does_not_matter(tmp_path: Path) -> None:
    from flows.cli_family import _keep_hint

    kept = tmp_path / "hints" / "a"
    for was_all_found in (True, False):
        _keep_hint(kept, was_all_found)
        assert kept.exists() == was_all_found
    (tmp_path / "file").touch()
    for was_all_found in (True, False):
        _keep_hint(tmp_path / "file" / "hints" / "a", was_all_found)
    assert not (tmp_path / "file").is_dir()

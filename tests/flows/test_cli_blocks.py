"""`exeunt blocks`: what a reviewer sees, and what it writes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from flows.cli import main
from flows.exit_codes import EXIT_BAD_INPUT, EXIT_OK
from tests.support.custom_blocks import DAMPED, marker_line, write_blocks


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_blocks(tmp_path / "blocks")


def test_a_review_shows_files_sums_imports_and_the_class_and_locks_them(
    blocks: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (blocks / "block.py").open("a") as file:
        file.write(marker_line(tmp_path / "marker"))
    assert main(["blocks", "review", str(blocks)]) == EXIT_OK
    told = capsys.readouterr().out
    for name in ("block.py", "math_of/damping.py", "modular_config.json"):
        assert name in told
        assert hashlib.sha256((blocks / name).read_bytes()).hexdigest() in told
    assert "class       block.Damped(ZImageDenoiseStep)" in told
    assert "inputs      damping" in told
    assert "imports diffusers.modular_pipelines, diffusers.modular_pipelines.z_image" in told
    last_line = len((blocks / "block.py").read_text().splitlines())
    assert f"look at line {last_line}: open(...)" in told
    (lock,) = (home / "blocks").glob("*.json")
    assert hashlib.sha256(lock.read_bytes()).hexdigest() == lock.stem
    assert lock.stem[:16] in told
    assert not (tmp_path / "marker").exists()


def test_a_dry_run_writes_no_lock(blocks: Path, home: Path) -> None:
    assert main(["blocks", "review", str(blocks), "--dry-run"]) == EXIT_OK
    assert not home.exists()


def test_a_second_review_shows_what_changed_since_the_first_one(
    blocks: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["blocks", "review", str(blocks)])
    (blocks / "block.py").write_text(DAMPED["block.py"].replace("0.9", "0.5"))
    capsys.readouterr()
    assert main(["blocks", "review", str(blocks)]) == EXIT_OK
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("-") and "default=0.9" in line for line in told)
    assert any(line.startswith("+") and "default=0.5" in line for line in told)


def test_reviews_are_listed_and_one_is_forgotten(
    blocks: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["blocks", "review", str(blocks), "--json"])
    digest = json.loads(capsys.readouterr().out)["digest"]
    main(["blocks", "ls", "--json"])
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["digest"] == digest and listed["directory"] == str(blocks)
    assert main(["blocks", "forget", digest[:12]]) == EXIT_OK
    main(["blocks", "ls", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == []
    assert main(["blocks", "forget", digest[:12]]) == EXIT_BAD_INPUT


def test_a_folder_that_cannot_be_reviewed_is_bad_input(
    blocks: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (blocks / "fast.so").write_bytes(b"\x7fELF")
    assert main(["blocks", "review", str(blocks)]) == EXIT_BAD_INPUT
    assert "fast.so is compiled code, which nobody can review" in capsys.readouterr().err
    assert not list(home.rglob("*.json"))


def test_text_of_a_folder_cannot_steer_the_terminal(
    blocks: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["blocks", "review", str(blocks)])
    (blocks / "block.py").write_text(DAMPED["block.py"] + "# \x1b[2J\n")
    (blocks / "a\x1b[1mb.py").write_text("")
    main(["blocks", "review", str(blocks)])
    assert "\x1b" not in capsys.readouterr().out

"""One stage process as its launcher holds it: its output, and what is told of its death."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from flows import host_memory
from flows.launch import Launcher
from flows.session import StageSession
from stages.errors import StageCrashed
from tests.support.stage_processes import Watcher, ask, eventually, running, wait_for_death


def test_output_becomes_log_lines_without_control_characters(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "exeunt.stage.encode")

    with StageSession("encode", launcher) as session:
        ask(session, "print", "\x1b[31mred\rdone\x07\n")

    assert [record.message for record in caplog.records] == [r"\x1b[31mred", r"done\x07"]


def test_a_flood_of_output_reaches_the_log_whole(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "exeunt.stage.encode")

    with StageSession("encode", launcher) as session:
        ask(session, "flood", 5000)

    assert [r.message for r in caplog.records] == [f"line {number}" for number in range(5000)]


@pytest.mark.parametrize(
    ("do", "value", "how"),
    [
        ("segfault", None, r"killed by signal 11 \(SIGSEGV\)"),
        ("signal", signal.SIGKILL, r"killed by signal 9 \(SIGKILL\)"),
        ("exit", 3, r"ended with exit code 3 \(of its own\)"),
        ("exit", 70, r"ended with exit code 70 \(an unexpected error outside of any request\)"),
    ],
)
def test_a_crash_says_how_and_the_next_run_gets_a_fresh_process(
    launcher: Launcher, do: str, value: Any, how: str
) -> None:
    with StageSession("decode", launcher) as session:
        first = ask(session, "echo")["pid"]

        with pytest.raises(StageCrashed, match=rf"phase decode {how} \(host memory: limit .* GiB"):
            ask(session, do, value)

        assert ask(session, "echo")["pid"] != first


def test_a_crash_repeats_the_last_lines_even_without_a_newline(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session, pytest.raises(StageCrashed) as caught:
        ask(session, "last_words", "\x1b[1mout of luck")

    assert str(caught.value).endswith("; its last lines:\n  first words\n  \\x1b[1mout of luck")


def test_a_kill_near_the_memory_limit_is_called_so(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "host_memory_limit_bytes", lambda: 4 << 20)

    with StageSession("denoise", launcher) as session:
        ask(session, "echo")
        with pytest.raises(StageCrashed) as caught:
            ask(session, "signal", signal.SIGKILL)

    assert str(caught.value).startswith(
        "phase denoise killed by signal 9 (SIGKILL), likely out of host memory: limit 4.0 MiB, "
        "last RSS "
    )


def test_a_crash_takes_the_programs_of_the_stage_along(launcher: Launcher, tmp_path: Path) -> None:
    watcher = Watcher()
    pid_file = tmp_path / "pid"
    session = StageSession("encode", launcher, on_event=watcher)

    with running(session, "grandchild", str(pid_file)) as errors:
        assert watcher.asleep.wait(30)
        os.kill(watcher.pid, signal.SIGKILL)
        assert eventually(lambda: bool(errors))

    assert isinstance(errors[0], StageCrashed)
    assert wait_for_death(int(pid_file.read_text()))

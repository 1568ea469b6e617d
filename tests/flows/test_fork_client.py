"""The fork server at work, and what is done without it."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from flows.launch import Launcher
from flows.session import StageSession
from stages.errors import StageCrashed
from tests.support.fake_stages import ENVIRON, LIGHT_PRELOAD
from tests.support.stage_processes import Watcher, ask, eventually, is_alive, parent_of, running


def test_a_fork_server_that_cannot_start_is_replaced_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preload = ["tests.support.fake_stages:preload_exit"]
    with Launcher(preload=preload, environ=ENVIRON) as launcher:
        for stage in ("encode", "decode"):
            with StageSession(stage, launcher) as session:
                assert ask(session, "echo", 7)["answer"] == 7
        assert launcher.method == "spawn"

    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert (
        "the fork server has ended: exit code 5; its last lines:\n  the library is" in warnings[0]
    )


def test_a_fork_server_with_a_second_thread_does_not_fork(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preload = ["tests.support.fake_stages:preload_thread"]
    with (
        Launcher(preload=preload, environ=ENVIRON) as launcher,
        StageSession("encode", launcher) as session,
    ):
        assert ask(session, "echo", 7)["answer"] == 7

    assert "its process has further threads: " in caplog.text
    assert launcher.method == "spawn"


def test_the_cuda_drivers_own_thread_does_not_stand_in_the_way_of_a_fork(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preload = ["tests.support.fake_stages:preload_driver_thread"]
    with (
        Launcher(preload=preload, environ=ENVIRON) as launcher,
        StageSession("encode", launcher) as session,
    ):
        assert ask(session, "echo", 7)["answer"] == 7
        assert launcher.method == "forkserver"
    assert "further threads" not in caplog.text


def test_a_fork_server_whose_imports_have_initialised_cuda_does_not_fork(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preload = ["tests.support.fake_stages:preload_cuda"]
    with (
        Launcher(preload=preload, environ=ENVIRON) as launcher,
        StageSession("encode", launcher) as session,
    ):
        assert ask(session, "echo", 7)["answer"] == 7

    assert "has initialised CUDA, so that no fork of it could use a GPU" in caplog.text
    assert launcher.method == "spawn"


def test_a_library_that_cannot_be_preloaded_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "exeunt.forkserver")
    with Launcher(preload=["absent_library"], environ=ENVIRON) as launcher:
        with StageSession("encode", launcher) as session:
            ask(session, "echo")
        assert launcher.method == "forkserver"

    assert "cannot preload absent_library: ModuleNotFoundError" in caplog.text


def test_losing_the_fork_server_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    watcher = Watcher()
    with Launcher(preload=LIGHT_PRELOAD, environ=ENVIRON) as launcher:
        session = StageSession("encode", launcher, on_event=watcher)
        with running(session, "sleep", 60) as errors:
            assert watcher.asleep.wait(30)
            os.kill(parent_of(watcher.pid), signal.SIGKILL)
            assert eventually(lambda: bool(errors))

            assert "phase encode ended together with the fork server" in str(errors[0])
            assert isinstance(errors[0], StageCrashed)
            assert not is_alive(watcher.pid)
            assert ask(session, "echo", 7)["answer"] == 7

    assert "the fork server has ended: killed by SIGKILL" in caplog.text


def test_the_fork_server_keeps_no_descriptor_of_its_children() -> None:
    with (
        Launcher(preload=LIGHT_PRELOAD, environ=ENVIRON) as launcher,
        StageSession("encode", launcher) as session,
    ):
        folder = Path(f"/proc/{parent_of(ask(session, 'echo')['pid'])}/fd")
        before = set(folder.iterdir())
        for stage in ("denoise", "decode"):
            with StageSession(stage, launcher) as other:
                ask(other, "echo")
                assert set(folder.iterdir()) == before


@pytest.mark.parametrize(("family", "encoder"), [("z-image", "qwen3"), ("flux", "t5")])
def test_the_real_fork_server_imports_everything_and_touches_nothing(
    family: str, encoder: str
) -> None:
    """Its children have the family's libraries; it has one thread and no CUDA driver mapped."""
    libraries = ["torch", "diffusers", f"transformers.models.{encoder}.modeling_{encoder}"]
    watcher = Watcher()
    pids = set()
    with Launcher(environ=ENVIRON) as launcher:
        launcher.expect(family)
        for _ in range(2):
            with StageSession("encode", launcher, on_event=watcher) as session:
                report = ask(session, "facts", libraries)
                server = parent_of(report["pid"])
                pids.add(report["pid"])
                assert report["answer"]["modules"] == libraries
                assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
                assert "libcuda.so" not in Path(f"/proc/{server}/maps").read_text()

    assert launcher.method == "forkserver"
    assert len(pids) == 2

"""Stage processes as a flow sees them: real processes, tiny stages."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from flows import launch
from flows.launch import Launcher, StageSession
from flows.stage_process import Event
from stages.errors import (
    RequestError,
    StageCancelled,
    StageCrashed,
    StageFailed,
    StageOutOfMemory,
    StageTimeout,
)
from stages.protocol import Done, Progress, Ready, Warn
from tests.support import fake_stages
from tests.support.fake_stages import ENVIRON, LIGHT_PRELOAD, context
from tests.support.stage_processes import (
    CONTEXT,
    Watcher,
    ask,
    eventually,
    is_alive,
    parent_of,
    running,
    wait_for_death,
)

REPOSITORY = Path(__file__).resolve().parents[2]


# ---- requests and answers ------------------------------------------------------------------


def test_one_process_serves_many_requests(launcher: Launcher) -> None:
    before = launcher.num_processes_started["encode"]

    with StageSession("encode", launcher) as session:
        reports = [ask(session, "echo", n) for n in range(5)]

    assert [report["answer"] for report in reports] == [0, 1, 2, 3, 4]
    assert len({report["pid"] for report in reports}) == 1
    assert launcher.num_processes_started["encode"] == before + 1


def test_no_process_starts_without_a_request(launcher: Launcher) -> None:
    with StageSession("condition", launcher):
        pass

    assert launcher.num_processes_started["condition"] == 0


def test_a_retired_process_is_gone(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        pid = ask(session, "echo")["pid"]
        assert is_alive(pid)

    assert not is_alive(pid)


def test_events_arrive_in_order_in_the_thread_of_the_caller(launcher: Launcher) -> None:
    watcher = Watcher()
    threads = set()

    def on_event(event: Event) -> None:
        threads.add(threading.get_ident())
        watcher(event)

    with StageSession("encode", launcher, on_event=on_event) as session:
        ask(session, "events", 3)

    ready, *steps, warning, done = watcher.events
    assert isinstance(ready, Ready)
    assert ready.elapsed_s >= 0
    assert steps == [Progress(activity="running", step=n, num_steps=3) for n in (1, 2, 3)]
    assert warning == Warn(message=r"half of \x1b[1mit was cut")
    assert isinstance(done, Done)
    assert threads == {threading.get_ident()}


def test_a_request_and_a_report_may_be_larger_than_a_pipe(launcher: Launcher) -> None:
    text = "a long prompt " * 50_000

    with StageSession("encode", launcher) as session:
        assert ask(session, "echo", text)["answer"] == text


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("RequestError", RequestError, "height 30 is not a multiple of 16; use 32"),
        ("MemoryError", StageOutOfMemory, "phase encode ran out of host memory: MemoryError"),
        (
            "OutOfMemoryError",
            StageOutOfMemory,
            "phase encode ran out of device memory: tried to allocate 2 GiB",
        ),
        ("KeyError", StageFailed, "phase encode failed: KeyError: 'missing'"),
        ("SystemExit", StageFailed, "phase encode failed: SystemExit: 3"),
        ("surrogate", StageFailed, r"phase encode failed: ValueError: bad \ud800 and \x1b[31mred"),
    ],
)
def test_an_error_crosses_the_border_with_its_type_and_the_process_lives_on(
    launcher: Launcher, name: str, kind: type[Exception], message: str
) -> None:
    with StageSession("encode", launcher) as session:
        pid = ask(session, "echo")["pid"]

        with pytest.raises(kind) as caught:
            ask(session, "raise", name)

        assert type(caught.value) is kind
        assert str(caught.value) == message
        assert ask(session, "echo")["pid"] == pid


def test_a_report_that_json_cannot_hold_fails_its_request_alone(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        with pytest.raises(StageFailed, match="PydanticSerializationError"):
            ask(session, "unserializable")

        assert ask(session, "echo", 1)["answer"] == 1


def test_a_request_of_another_phase_is_refused(launcher: Launcher) -> None:
    with (
        StageSession("encode", launcher) as session,
        pytest.raises(RequestError, match="session of phase encode got a decode request"),
    ):
        session.run(fake_stages.request("echo", stage="decode"), CONTEXT)


def test_a_request_that_is_no_unicode_is_refused_before_a_process_starts(
    launcher: Launcher,
) -> None:
    with (
        StageSession("condition", launcher) as session,
        pytest.raises(RequestError, match="request of phase condition is no UTF-8 text"),
    ):
        ask(session, "echo", "\ud800")

    assert launcher.num_processes_started["condition"] == 0


def test_a_process_outlives_the_thread_that_first_used_it(launcher: Launcher) -> None:
    pids: list[int] = []

    with StageSession("encode", launcher) as session:
        for _ in range(2):
            thread = threading.Thread(target=lambda: pids.append(ask(session, "echo")["pid"]))
            thread.start()
            thread.join()
        pids.append(ask(session, "echo")["pid"])

    assert len(set(pids)) == 1


def test_threads_share_a_session_one_request_at_a_time(launcher: Launcher) -> None:
    reports: list[dict[str, Any]] = []

    with StageSession("encode", launcher) as session:
        threads = [
            threading.Thread(target=lambda n=n: reports.append(ask(session, "echo", n)))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sorted(report["answer"] for report in reports) == list(range(8))
    assert len({report["pid"] for report in reports}) == 1


# ---- what a child is -----------------------------------------------------------------------


def test_both_methods_make_the_same_kind_of_process(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        facts = ask(session, "facts", ["torch", "prefect", "flows.launch"])["answer"]

    assert facts == {
        "modules": [],
        "is_leader": True,
        "num_fds": 6,  # 0 to 2, request, event, lifeline
        "inheritable": [],  # by programs that the stage starts
        "folder": str(Path.cwd()),
        "offline": "1",
        "sigint": True,
    }


def test_children_draw_different_random_numbers(launcher: Launcher) -> None:
    numbers = set()
    for _ in range(2):
        with StageSession("encode", launcher) as session:
            numbers.add(ask(session, "random")["answer"])

    assert len(numbers) == 2


def test_an_unexpected_error_logs_its_traceback(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    with StageSession("encode", launcher) as session, pytest.raises(StageFailed):
        ask(session, "raise", "KeyError")

    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors[0] == "Traceback (most recent call last):"
    assert errors[-1] == "KeyError: 'missing'"


# ---- crashes -------------------------------------------------------------------------------


def test_a_process_that_dies_between_requests_is_replaced(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        pid = ask(session, "echo")["pid"]
        os.kill(pid, signal.SIGKILL)
        assert wait_for_death(pid)

        assert ask(session, "echo", "fresh")["answer"] == "fresh"


# ---- ends that the flow decides ------------------------------------------------------------


def test_a_timeout_kills_even_a_native_call_that_keeps_the_interpreter_lock(
    launcher: Launcher,
) -> None:
    watcher = Watcher()
    with StageSession("encode", launcher, 0.3, watcher) as session:
        with pytest.raises(
            StageTimeout, match=r"phase encode did not answer within 0\.3 s and was killed"
        ):
            ask(session, "stick")

        assert not is_alive(watcher.pid)
        assert ask(session, "echo", "fresh")["answer"] == "fresh"


def test_closing_from_another_thread_cancels_the_request_and_every_later_one(
    launcher: Launcher, tmp_path: Path
) -> None:
    watcher = Watcher()
    scratch = tmp_path / "scratch"
    session = StageSession("encode", launcher, on_event=watcher)

    with running(session, "clean_up", str(scratch)) as errors:
        assert watcher.asleep.wait(30)
        assert scratch.exists()
        session.close()

        assert not is_alive(watcher.pid)
        assert not scratch.exists()  # SIGTERM let the stage clean up
    assert [type(error) for error in errors] == [StageCancelled]
    with pytest.raises(StageCancelled):
        ask(session, "echo")


def test_closing_kills_programs_that_ignore_sigterm(launcher: Launcher, tmp_path: Path) -> None:
    watcher = Watcher()
    pid_file = tmp_path / "pid"
    session = StageSession("encode", launcher, on_event=watcher, grace_s=0.2)

    with running(session, "grandchild", str(pid_file)):
        assert watcher.asleep.wait(30)
        session.close()

        assert not is_alive(watcher.pid)
        assert wait_for_death(int(pid_file.read_text()))


def test_a_process_that_ignores_the_closed_pipe_and_sigterm_is_killed(launcher: Launcher) -> None:
    session = StageSession("encode", launcher, grace_s=0.1)
    pid = ask(session, "echo")["pid"]
    os.kill(pid, signal.SIGSTOP)

    session.close()

    assert not is_alive(pid)


def test_a_signal_handler_may_close_the_session_that_it_interrupts(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "KILL_WAIT_S", 600.0)  # waiting for itself would be for ever
    watcher = Watcher()

    def on_event(event: Event) -> None:
        watcher(event)
        if watcher.asleep.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    session = StageSession("encode", launcher, on_event=on_event)
    before = signal.signal(signal.SIGUSR1, lambda *_: session.close())
    try:
        with pytest.raises(StageCancelled):
            ask(session, "sleep", 60)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert not is_alive(watcher.pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_an_exception_in_the_caller_kills_the_process_and_goes_on_up(
    launcher: Launcher, error: type[BaseException]
) -> None:
    watcher = Watcher()

    def on_event(event: Event) -> None:
        watcher(event)
        if watcher.asleep.is_set():
            raise error

    with StageSession("encode", launcher, on_event=on_event) as session:
        with pytest.raises(error):
            ask(session, "stick")

        assert not is_alive(watcher.pid)


def test_closing_while_the_fork_server_still_imports_cancels_the_request() -> None:
    preload = ["tests.support.fake_stages:preload_slowly"]
    with Launcher(preload=preload, environ=ENVIRON) as launcher:
        session = StageSession("encode", launcher)
        with running(session, "echo", None) as errors:
            assert eventually(lambda: launcher._server is not None)
            session.close()
        assert [type(error) for error in errors] == [StageCancelled]


def test_a_closed_launcher_starts_nothing() -> None:
    launcher = Launcher("spawn", environ=ENVIRON)
    launcher.close()

    with pytest.raises(StageCancelled, match="its launcher is closed"):
        ask(StageSession("encode", launcher), "echo")


def test_closing_the_launcher_ends_children_that_a_session_still_holds() -> None:
    for method in ("forkserver", "spawn"):
        launcher = Launcher(method, preload=LIGHT_PRELOAD, environ=ENVIRON)
        session = StageSession("encode", launcher)
        pid = ask(session, "echo")["pid"]

        launcher.close()

        assert wait_for_death(pid)
        session.close()


# ---- one GPU stage at a time ---------------------------------------------------------------


def test_a_stage_waits_for_its_device_without_using_up_its_time(
    launcher: Launcher, tmp_path: Path
) -> None:
    on_gpu = context(tmp_path, "cuda")
    watcher = Watcher()
    first = StageSession("encode", launcher)
    holder = first.run(fake_stages.request("echo"), on_gpu)[1]["pid"]
    second = StageSession("denoise", launcher, 0.5, watcher)
    reports: list[dict[str, Any]] = []
    thread = threading.Thread(
        target=lambda: reports.append(
            second.run(fake_stages.request("echo", stage="denoise"), on_gpu)[1]
        )
    )

    thread.start()
    try:
        waiting = Progress(activity="waiting", message=f"cuda is used by process {holder}")
        assert eventually(lambda: watcher.events.count(waiting) >= 2)
        os.kill(holder, signal.SIGKILL)
    finally:
        thread.join()
        first.close()
        second.close()

    assert [report["answer"] for report in reports] == [None]


# ---- the fork server -----------------------------------------------------------------------


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

    assert "its process has 2 threads instead of 1" in caplog.text


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


def test_the_real_fork_server_imports_everything_and_touches_nothing() -> None:
    """Its children have the libraries; it has no thread but one and no CUDA driver mapped."""
    libraries = ["torch", "diffusers", "transformers.models.qwen3.modeling_qwen3"]
    watcher = Watcher()
    pids = set()
    with Launcher(environ=ENVIRON) as launcher:
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


# ---- the death of the flow process ---------------------------------------------------------

FLOW = """
import json, os, sys, time
from pathlib import Path
from flows.launch import Launcher, StageSession
from tests.support.fake_stages import ENVIRON, context, request

def tell(event):
    print(event.kind, getattr(event, "message", ""), flush=True)

method, preload, steps, fork = json.loads(sys.argv[1])
launcher = Launcher(method, preload=preload, environ=ENVIRON)
launcher.start_fork_server()
print("started", flush=True)
session = StageSession("encode", launcher, on_event=tell)
for do, value in steps:
    session.run(request(do, value), context(Path.cwd()))
heavy = {"torch", "diffusers", "transformers", "prefect"}
print("modules", *sorted(heavy & set(sys.modules)), flush=True)
if fork and os.fork() == 0:
    print("forked", flush=True)
time.sleep(60)
"""


class Flow:
    """A flow process of its own in a folder with a space, and every process it leads to."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.mark = f"EXEUNT_TEST_MARK={uuid.uuid4()}"
        folder = folder / "a folder"
        folder.mkdir()
        (folder / "argparse.py").write_text("raise ImportError('out of the working folder')")
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", FLOW, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), name: value},
        )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        for found in self.process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"the flow ended before it said {line!r}")

    def processes(self) -> set[int]:
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and is_alive(int(folder.name)):
                try:
                    environ = (folder / "environ").read_bytes()
                except OSError:
                    continue
                if self.mark.encode() in environ.split(b"\0"):
                    found.add(int(folder.name))
        return found

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


SLOW = ["tests.support.fake_stages:preload_slowly"]
LIGHT = list(LIGHT_PRELOAD)


@pytest.mark.parametrize(
    ("method", "preload", "steps", "line", "num_processes"),
    [
        ("forkserver", SLOW, [], "started", 2),
        ("forkserver", LIGHT, [["echo", 1]], "done", 3),
        ("forkserver", LIGHT, [["stick", 0]], "progress asleep", 3),
        ("forkserver", LIGHT, [["grandchild", "pid"]], "progress asleep", 4),
        ("spawn", LIGHT, [["echo", 1]], "done", 2),
        ("spawn", LIGHT, [["stick", 0]], "progress asleep", 2),
        ("spawn", LIGHT, [["grandchild", "pid"]], "progress asleep", 3),
    ],
    ids=[
        "fork server imports",
        "forked child idle",
        "forked child in a native call",
        "forked child waits for a program",
        "spawned child idle",
        "spawned child in a native call",
        "spawned child waits for a program",
    ],
)
def test_no_process_survives_a_killed_flow(
    tmp_path: Path, method: str, preload: list[str], steps: Any, line: str, num_processes: int
) -> None:
    flow = Flow(tmp_path, method, preload, steps, False)
    try:
        flow.wait_for(line)
        assert eventually(lambda: len(flow.processes()) == num_processes)

        flow.process.kill()

        assert eventually(lambda: not flow.processes())
    finally:
        flow.end()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_child_dies_with_its_flow_although_a_fork_of_the_flow_keeps_its_pipes(
    tmp_path: Path, method: str
) -> None:
    flow = Flow(tmp_path, method, LIGHT, [["echo", 1]], True)
    try:
        flow.wait_for("forked")
        flow.process.kill()

        assert eventually(lambda: len(flow.processes()) == 1)  # the flow's own fork
    finally:
        flow.end()


def test_the_flow_process_loads_no_model_library(tmp_path: Path) -> None:
    flow = Flow(tmp_path, "forkserver", LIGHT, [["echo", 1]], False)
    try:
        flow.wait_for("modules")
    finally:
        flow.end()

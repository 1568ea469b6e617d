"""A phase's requests and answers, and the ends that the flow decides: real processes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from flows import session as session_module
from flows.launch import Launcher
from flows.session import StageSession
from flows.stage_process import Event
from stages.errors import (
    RequestError,
    StageCancelled,
    StageFailed,
    StageOutOfMemory,
    StageTimeout,
)
from stages.protocol import Done, Progress, Ready, Warn
from tests.support import fake_stages
from tests.support.fake_stages import context
from tests.support.stage_processes import (
    CONTEXT,
    Watcher,
    ask,
    eventually,
    is_alive,
    running,
    wait_for_death,
)

# ---- requests and answers ------------------------------------------------------------------


def test_one_process_serves_many_requests(launcher: Launcher) -> None:
    before = launcher.num_processes_started["encode"]

    with StageSession("encode", launcher) as session:
        reports = [ask(session, "echo", n) for n in range(5)]

    assert [report["answer"] for report in reports] == [0, 1, 2, 3, 4]
    assert len({report["pid"] for report in reports}) == 1
    assert launcher.num_processes_started["encode"] == before + 1


def test_a_session_that_rests_gives_its_process_up_and_goes_on_in_another(
    launcher: Launcher,
) -> None:
    with StageSession("encode", launcher) as session:
        session.rest()  # before the first request: nothing to give up
        first = ask(session, "echo")["pid"]
        session.rest()
        assert wait_for_death(first)
        assert ask(session, "echo")["pid"] != first


def test_a_session_at_work_does_not_rest(launcher: Launcher) -> None:
    asked: list[StageSession] = []
    with StageSession(
        "encode", launcher, on_event=lambda event: asked[0].rest() if asked else None
    ) as session:
        asked.append(session)
        first = ask(session, "events", 3)["pid"]
        assert ask(session, "echo")["pid"] == first


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


def test_a_listener_that_fails_is_logged_once_and_the_stage_goes_on(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def on_event(event: Event) -> None:
        heard.append(event.kind)
        raise KeyError("no such bar")

    with StageSession("encode", launcher, on_event=on_event) as session:
        pid = ask(session, "events", 2)["pid"]
        assert ask(session, "echo", 7) == {"answer": 7, "pid": pid}

    assert heard == ["ready", "progress", "progress", "warn", "done", "done"]
    first, warning = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "its listener failed at a ready event" in first.message
    assert first.exc_info is not None and first.exc_info[0] is KeyError
    assert warning.message == r"half of \x1b[1mit was cut"  # told all the same


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


def test_an_unexpected_error_logs_its_traceback(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    with StageSession("encode", launcher) as session, pytest.raises(StageFailed):
        ask(session, "raise", "KeyError")

    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors[0] == "Traceback (most recent call last):"
    assert errors[-1] == "KeyError: 'missing'"


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


def test_a_process_that_dies_between_requests_is_replaced(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        pid = ask(session, "echo")["pid"]
        os.kill(pid, signal.SIGKILL)
        assert wait_for_death(pid)

        assert ask(session, "echo", "fresh")["answer"] == "fresh"


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
    # Waiting for itself would be for ever.
    monkeypatch.setattr(session_module, "KILL_WAIT_S", 600.0)
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_of_the_caller_kills_the_process_and_goes_on_up(
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


def test_an_exception_out_of_a_signal_handler_kills_the_process_and_goes_on_up(
    launcher: Launcher,
) -> None:
    """What a listener itself raises is another matter."""
    watcher = Watcher()
    caller = threading.get_ident()

    def interrupt() -> None:
        watcher.asleep.wait(30)
        eventually(lambda: "exchange" in functions_of(caller))  # no longer in the listener
        signal.pthread_kill(caller, signal.SIGUSR1)

    def on_signal(signum: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with StageSession("encode", launcher, on_event=watcher) as session:
            with pytest.raises(Alarm):
                ask(session, "stick")

            assert not is_alive(watcher.pid)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


class Alarm(Exception):
    """No `OSError`: a signal may arrive anywhere, and some of those are passed over."""


def functions_of(thread: int) -> list[str]:
    """Names of the functions that a thread is in."""
    frame = sys._current_frames()[thread]
    return [inner.f_code.co_name for inner, _ in traceback.walk_stack(frame)]

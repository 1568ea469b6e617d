"""The child's side of the pipes: what it answers, what it ends with, what it does not survive."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stages import worker
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import ArtifactMissing, RequestError
from stages.protocol import (
    EVENTS,
    EXIT_BAD_REQUEST,
    EXIT_DONE,
    EXIT_EVENTS_CLOSED,
    EXIT_MEANINGS,
    EXIT_ORPHANED,
    EXIT_TERMINATED,
    Done,
    Failed,
    Progress,
    Ready,
    Run,
    Warn,
)
from tests.support.fake_stages import ENVIRON, context, request

CONTEXT = context(Path("/nonexistent"))


def line(do: str, value: Any = None) -> bytes:
    return Run(request=request(do, value), context=CONTEXT).model_dump_json().encode() + b"\n"


def fake(stage: str) -> worker.Handler:
    from tests.support import fake_stages

    return fake_stages.run


def serve(lines: bytes, handlers: Callable[[str], worker.Handler] = fake) -> tuple[int, list[Any]]:
    """Run `worker.serve` in this process over these request lines; its code and its events."""
    request_r, request_w = os.pipe()
    event_r, event_w = os.pipe()
    os.write(request_w, lines)
    os.close(request_w)
    found: list[bytes] = []
    with os.fdopen(event_r, "rb") as events:
        reader = Thread(target=lambda: found.extend(events))
        reader.start()
        try:
            code = worker.serve(request_r, event_w, handlers)
        finally:
            os.close(request_r)
            os.close(event_w)
            reader.join()
    return code, [EVENTS.validate_json(event) for event in found]


# ---- one answer per request ----------------------------------------------------------------


def test_the_end_of_the_request_pipe_is_the_end_of_the_work() -> None:
    code, events = serve(b"")

    assert code == EXIT_DONE
    (ready,) = events
    assert isinstance(ready, Ready)
    assert ready.pid == os.getpid()
    assert ready.elapsed_s > 0


def test_each_request_gets_exactly_one_answer_in_order() -> None:
    code, (_, *events) = serve(
        line("echo", 1) + line("raise", "KeyError") + line("events", 1) + line("echo", 2)
    )

    assert code == EXIT_DONE
    kinds = [Done, Failed, Progress, Warn, Done, Done]
    assert [type(event) for event in events] == kinds
    assert [event.report["answer"] for event in (events[0], events[-1])] == [1, 2]


def test_what_a_failed_request_held_is_gone_before_the_next_one() -> None:
    """A decode without memory is asked for again in tiles: the first try's tensors must go."""

    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    were_alive: list[bool] = []

    def handler(*_: Any) -> tuple[StageResult, dict[str, Any]]:
        were_alive.extend(each() is not None for each in held)
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        cycle: list[Any] = [tensor]
        cycle.append(cycle)
        try:
            raise MemoryError
        except MemoryError as error:
            cycle.append(error)  # whose traceback holds this frame
            raise

    gc.disable()
    try:
        serve(line("echo") + line("echo"), lambda stage: handler)
    finally:
        gc.enable()

    assert were_alive == [False]


def test_a_handler_gets_the_label_although_it_is_no_part_of_a_requests_json() -> None:
    labels: list[str] = []

    def handler(
        request: StageRequest, context: StageContext, events: worker.Events
    ) -> tuple[StageResult, dict[str, Any]]:
        labels.append(request.label)
        return StageResult(stage="encode", artifacts={}), {}

    run = Run(request=request("echo"), context=CONTEXT, label="picture 2 of 4")

    serve(run.model_dump_json().encode() + b"\n", lambda stage: handler)

    assert labels == ["picture 2 of 4"]


def test_a_line_that_is_no_request_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    code, events = serve(b'{"kind": "run"}\n' + line("echo"))

    assert code == EXIT_BAD_REQUEST
    assert len(events) == 1
    assert "request line is no request" in capsys.readouterr().err


def test_a_closed_event_pipe_ends_the_process() -> None:
    request_r, request_w = os.pipe()
    event_r, event_w = os.pipe()
    os.close(event_r)
    try:
        assert worker.serve(request_r, event_w, fake) == EXIT_EVENTS_CLOSED
    finally:
        for fd in (request_r, request_w, event_w):
            os.close(fd)


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (RequestError("too wide"), "RequestError", "too wide"),
        (ArtifactMissing("gone"), "ArtifactMissing", "gone"),
        (
            type("LocalError", (ArtifactMissing,), {})("gone"),
            "ArtifactMissing",
            "gone",
        ),
        (MemoryError(), "StageOutOfMemory", "phase encode ran out of host memory: MemoryError"),
        (
            type("OutOfMemoryError", (RuntimeError,), {})("2 GiB"),
            "StageOutOfMemory",
            "phase encode ran out of device memory: 2 GiB",
        ),
        (ZeroDivisionError("by 0"), "StageFailed", "phase encode failed: ZeroDivisionError: by 0"),
        (SystemExit(2), "StageFailed", "phase encode failed: SystemExit: 2"),
    ],
)
def test_an_error_becomes_a_type_that_the_launcher_knows(
    error: BaseException, name: str, message: str
) -> None:
    def handler(
        request: StageRequest, context: StageContext, events: worker.Events
    ) -> tuple[StageResult, dict[str, Any]]:
        raise error

    _, (_, failed) = serve(line("echo"), lambda stage: handler)

    assert (failed.error, failed.message) == (name, message)
    assert "in handler" in failed.traceback


def test_torch_out_of_memory_is_known_by_its_real_name() -> None:
    import torch

    failed = worker.failure(torch.OutOfMemoryError("tried to allocate 2 GiB"), "denoise")

    assert failed.error == "StageOutOfMemory"


def test_a_stage_whose_library_is_absent_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(worker.HANDLERS_VARIABLE, raising=False)
    monkeypatch.setitem(worker.HANDLERS, "encode", "absent_library:run")

    _, (_, failed) = serve(line("echo"), worker.handler_for)

    assert failed.error == "DependencyError"
    assert failed.message.startswith(
        "phase encode needs a library that cannot be imported: No module named 'absent_library'"
    )


def test_events_of_several_threads_never_mix() -> None:
    def handler(
        request: StageRequest, context: StageContext, events: worker.Events
    ) -> tuple[StageResult, dict[str, Any]]:
        threads = [
            Thread(target=events.progress, args=("running", n, 20, "x" * 200_000))
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return StageResult(stage="encode", artifacts={}), {}

    _, events = serve(line("echo"), lambda stage: handler)

    assert {event.step for event in events if isinstance(event, Progress)} == set(range(20))


def test_every_exit_code_has_its_own_meaning() -> None:
    assert len(set(EXIT_MEANINGS.values())) == len(EXIT_MEANINGS) == 6


# ---- a process of its own ------------------------------------------------------------------


class Pipes:
    """Both ends of a child's pipes, and how to start it as the launcher would."""

    def __init__(self) -> None:
        self.request_r, self.request_w = os.pipe()
        self.event_r, self.event_w = os.pipe()
        self.lifeline_r, self.lifeline_w = os.pipe()

    def start(
        self,
        *command: str,
        parent_pid: int | None = None,
        environ: Mapping[str, str] = ENVIRON,
    ) -> subprocess.Popen[bytes]:
        fds = {"request": self.request_r, "event": self.event_w, "lifeline": self.lifeline_r}
        options = [text for name, fd in fds.items() for text in (f"--{name}-fd", str(fd))]
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", *(command or ("-m", "stages.worker")), "encode", *options),
                *("--parent-pid", str(parent_pid or os.getpid())),
            ],
            pass_fds=list(fds.values()),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environ},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name in ("request_r", "event_w", "lifeline_r"):
            self.close(name)
        self.events = os.fdopen(self.event_r, "rb", closefd=False)
        return child

    def next_event(self) -> Any:
        return EVENTS.validate_json(self.events.readline())

    def close(self, name: str) -> None:
        fd = getattr(self, name)
        setattr(self, name, -1)
        with suppress(OSError):
            os.close(fd)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    for name in ("request_r", "request_w", "event_r", "event_w", "lifeline_r", "lifeline_w"):
        pipes.close(name)


@contextmanager
def running(pipes: Pipes, *arguments: Any, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = pipes.start(*arguments, **options)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def test_a_child_ends_with_code_0_when_its_request_pipe_closes(pipes: Pipes) -> None:
    with running(pipes) as child:
        assert pipes.next_event().pid == child.pid
        os.write(pipes.request_w, line("echo", "hello"))
        assert pipes.next_event().report["answer"] == "hello"

        pipes.close("request_w")

        assert child.wait(30) == EXIT_DONE


def test_a_child_of_another_parent_ends_before_it_starts(pipes: Pipes) -> None:
    with running(pipes, parent_pid=1) as child:
        assert child.wait(30) == EXIT_ORPHANED


def test_a_child_whose_lifeline_is_cut_already_ends_before_it_starts(pipes: Pipes) -> None:
    pipes.close("lifeline_w")
    with running(pipes) as child:
        assert child.wait(30) == EXIT_ORPHANED


def test_a_cut_lifeline_kills_a_child_at_once(pipes: Pipes) -> None:
    with running(pipes) as child:
        pipes.next_event()

        pipes.close("lifeline_w")

        assert child.wait(30) == -signal.SIGKILL


def test_a_thread_watches_the_lifeline_where_the_kernel_does_not_signal(pipes: Pipes) -> None:
    code = """
import fcntl
def refuse(*_): raise OSError("not on this kernel")
fcntl.fcntl = refuse
from stages.worker import main
main()
"""
    with running(pipes, "-c", code) as child:
        pipes.next_event()

        pipes.close("lifeline_w")

        assert child.wait(30) == -signal.SIGKILL


def test_sigterm_lets_the_stage_clean_up_and_ends_the_child(pipes: Pipes, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with running(pipes) as child:
        pipes.next_event()
        os.write(pipes.request_w, line("clean_up", str(scratch)))
        pipes.next_event()
        assert scratch.exists()

        child.terminate()

        assert child.wait(30) == EXIT_TERMINATED
        assert not scratch.exists()


def test_sigint_is_left_to_the_launcher(pipes: Pipes) -> None:
    with running(pipes) as child:
        pipes.next_event()

        child.send_signal(signal.SIGINT)

        os.write(pipes.request_w, line("echo", "still here"))
        assert pipes.next_event().report["answer"] == "still here"


def test_a_spawned_child_imports_no_torch_before_its_first_request(pipes: Pipes) -> None:
    with running(pipes):
        pipes.next_event()
        os.write(pipes.request_w, line("facts", ["torch", "numpy", "diffusers"]))

        assert pipes.next_event().report["answer"]["modules"] == []


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_threads_wait_without_spinning_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    environ = dict(given)
    monkeypatch.setattr(os, "environ", environ)
    worker.prepare_environment()
    assert environ["OMP_WAIT_POLICY"] == expected

"""A phase's conversation with its process: requests down, events up, one answer each."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from flows.launch import Launcher
from flows.stage_process import (
    KILL_WAIT_S,
    START_TIMEOUT_S,
    TICK_S,
    Event,
    Logger,
    StageProcess,
    printable,
)
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import (
    ERROR_TYPES,
    RequestError,
    StageCancelled,
    StageCrashed,
    StageError,
    StageFailed,
    StageOutOfMemory,
    StageTimeout,
)
from stages.protocol import Done, Failed, Progress, Ready, Run, Warn


class StageSession:
    """One phase's process: started by the first request, kept for the next, then retired.

    Args:
        stage: The phase, as in `StageRequest.stage`.
        launcher: Makes the process.
        timeout_s: Seconds that a request may take once its process is ready; the time that
            it waits for its turn on the device does not count. None: no limit.
        on_event: Gets each event, in the thread that called `run`. The first `Exception` that
            it raises is logged; the request goes on, and so do the events.
        grace_s: Seconds for a process to end by itself, before SIGTERM and before SIGKILL.
        logger: Gets the process's standard output and error, line by line.
    """

    def __init__(
        self,
        stage: str,
        launcher: Launcher,
        timeout_s: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        *,
        grace_s: float = 3.0,
        logger: Logger | None = None,
    ) -> None:
        self.stage = stage
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._is_listener_broken = False
        self._grace_s = grace_s
        self._logger = logger or logging.getLogger(f"exeunt.stage.{stage}")
        self._turn = threading.Lock()  # one request at a time
        # Guards _process. Reentrant: `close` may run in a signal handler over `run`.
        self._state = threading.RLock()
        self._process: StageProcess | None = None
        self._events: deque[Event] = deque()  # those that are read and not yet told
        self._runner: int | None = None  # the thread that has the turn in `run`
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self, request: StageRequest, context: StageContext
    ) -> tuple[StageResult, dict[str, Any]]:
        """Run a request in this phase's process and wait for its result and report.

        Raises:
            StageCancelled: The session was closed, before or during this call.
            StageCrashed: The process died; the next `run` starts a fresh one.
            StageTimeout: It took longer than `timeout_s` and was killed.
            StageError: What the stage itself raised, in its own type; the process lives on.

        Any other exception in this thread, such as Ctrl-C, kills the process and goes on up.
        """
        if request.stage != self.stage:
            raise RequestError(f"the session of phase {self.stage} got a {request.stage} request")
        line = self._line(request, context)
        with self._turn:
            self._runner = threading.get_ident()
            try:
                answer = self._answer(self._living_process(), request, line)
            except BaseException:
                self._discard()
                raise
            finally:
                self._runner = None
        if isinstance(answer, Failed):
            raise self._failure(answer)
        return answer.result, answer.report

    def rest(self) -> None:
        """Retire an idle process, so that its device is free; the next `run` starts another."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            with self._state:
                process, self._process = self._process, None
            if process is not None:
                process.retire(self._grace_s)
                process.release()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Retire the process; a request in progress is cancelled, and none can start after.

        An idle process ends when its request pipe closes; a busy one gets SIGTERM, and what
        is left of the process group gets SIGKILL. Returns when the process is gone. Safe from
        any thread and from a signal handler.
        """
        with self._state:
            self._is_closed = True
            process = self._process
        if self._runner == threading.get_ident():
            # A signal handler over `run` in this very thread: `run` goes on afterwards, finds
            # the process dead and lets go of its pipes.
            if process is not None:
                process.terminate(self._grace_s)
            return
        if self._turn.locked() and process is not None:
            process.terminate(self._grace_s)
        if not self._turn.acquire(timeout=KILL_WAIT_S):
            return  # `on_event` does not return; the process is gone all the same
        try:
            if self._process is not None:
                self._process.retire(self._grace_s)
                self._process.release()
                self._process = None
        finally:
            self._turn.release()

    def _living_process(self) -> StageProcess:
        """The process of this session, or a fresh one in its place."""
        if self._process is not None and self._process.is_over():
            self._discard()
        if self._is_closed:
            raise self._cancelled()
        if self._process is None:
            process = self._launcher.start(self.stage, self._logger, lambda: self._is_closed)
            with self._state:
                self._process = process
        return self._process

    def _discard(self) -> None:
        with self._state:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.release()

    def _line(self, request: StageRequest, context: StageContext) -> bytes:
        try:
            run = Run(request=request, context=context, label=request.label)
            return run.model_dump_json().encode() + b"\n"
        except ValueError as error:
            raise RequestError(
                f"request of phase {self.stage} is no UTF-8 text: {error}"
            ) from error

    def _answer(self, process: StageProcess, request: StageRequest, line: bytes) -> Done | Failed:
        """Have the process do one request."""
        del request
        self._events.clear()
        process.send(line)
        return self._next_answer(process, self._tell)

    def _next_answer(self, process: StageProcess, tell: Callable[[Event], None]) -> Done | Failed:
        """The answer to the first request that has none; `tell` gets the events before it."""
        clock = Clock(self._timeout_s if process.is_ready else START_TIMEOUT_S)
        while True:
            if self._is_closed:
                raise self._cancelled()
            if not self._events:
                self._events.extend(process.exchange(TICK_S))
            is_quiet = not self._events
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Ready):
                    clock = Clock(self._timeout_s)
                elif isinstance(event, Progress):
                    clock.is_stopped = event.activity == "waiting"
                tell(event)
                if isinstance(event, Done | Failed):
                    return event
            if is_quiet and process.is_over():
                if self._is_closed:
                    raise self._cancelled()
                raise StageCrashed(process.crash_message())
            if clock.is_up():
                what = "answer" if process.is_ready else "start"
                raise StageTimeout(
                    f"phase {self.stage} did not {what} within {clock.limit_s:g} s and was killed; "
                    "raise its timeout"
                )

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
                return
            except Exception:  # a display's trouble is never the stage's
                if not self._is_listener_broken:
                    self._logger.exception(
                        "phase %s goes on, though not every event of it is shown: its listener "
                        "failed at a %s event",
                        self.stage,
                        event.kind,
                    )
                self._is_listener_broken = True
        if isinstance(event, Warn):
            self._logger.warning("%s", event.message)

    def _cancelled(self) -> StageCancelled:
        return StageCancelled(f"phase {self.stage} was cancelled: its session is closed")

    def _failure(self, answer: Failed) -> StageError:
        kind = ERROR_TYPES.get(answer.error, StageFailed)
        # Prefect logs no traceback of a task that is not retried.
        is_unexpected = issubclass(kind, StageFailed | StageOutOfMemory)
        for text in answer.traceback.splitlines():
            self._logger.log(
                logging.ERROR if is_unexpected else logging.DEBUG, "%s", printable(text)
            )
        return kind(answer.message)


class Clock:
    """The time that a request may take; it stands still while the request waits its turn."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.is_stopped = False
        self._spent_s = 0.0
        self._looked_at = time.monotonic()

    def is_up(self) -> bool:
        now = time.monotonic()
        if not self.is_stopped:
            self._spent_s += now - self._looked_at
        self._looked_at = now
        return self.limit_s is not None and self._spent_s > self.limit_s

"""One stage process as its launcher holds it: pipes, log lines, signals, and how it died."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from flows.host_memory import MemoryWatch
from stages.errors import StageCancelled, StageCrashed
from stages.protocol import (
    EVENTS,
    EXIT_MEANINGS,
    MAX_PACKET_BYTES,
    Done,
    Failed,
    Progress,
    Ready,
    Warn,
)

T = TypeVar("T")
Event = Ready | Progress | Warn | Done | Failed
Logger = logging.Logger | logging.LoggerAdapter[Any]

TICK_S = 0.2
START_TIMEOUT_S = 120.0
KILL_WAIT_S = 30.0  # a killed process first gives back its device memory and pinned pages
NUM_LAST_LINES = 20
MAX_LINE_BYTES = 4096


@dataclass(frozen=True)
class Child:
    """A process that exists, and the hold on it of whoever reaps it.

    Attributes:
        pid: Its process id, and that of its process group.
        exited: Its exit code or minus its signal, once it is reaped; None when the fork
            server ended before it could tell.
        signal_group: Sends a signal to its group, unless it is reaped.
    """

    pid: int
    exited: futures.Future[int | None]
    signal_group: Callable[[int], None]


class StageProcess:
    """This process's ends of one child's pipes, and the child's last hours.

    `kill`, `terminate` and `wait` may be called from any thread; the rest by whoever has
    the session's turn.
    """

    def __init__(self, stage: str, logger: Logger) -> None:
        self.stage = stage
        self.is_ready = False
        request_r, self._request_w = os.pipe()
        self._event_r, event_w = os.pipe()
        log_r, log_w = os.pipe()
        lifeline_r, lifeline_w = os.pipe()
        os.set_blocking(self._request_w, False)
        self.child_fds = [request_r, event_w, log_w, lifeline_r]
        self._lifeline = [lifeline_w]  # emptied by whoever closes it
        self._log = LogLines(log_r, logger)
        self._child: Child | None = None
        self._outgoing = b""
        self._incoming = b""
        self._is_silent = False
        self._memory = MemoryWatch()

    def adopt(self, child: Child) -> None:
        self._child = child

    def close_child_fds(self) -> None:
        """Close the child's ends here, so that a pipe ends when the child does."""
        while self.child_fds:
            os.close(self.child_fds.pop())

    def send(self, line: bytes) -> None:
        """Queue a request line; `exchange` writes it."""
        self._outgoing += line
        if self._child is not None:
            self._memory.look(self._child.pid)

    def exchange(self, timeout_s: float) -> list[Event]:
        """Write what is queued and give the events that came, after `timeout_s` at most.

        Control characters in their messages are escaped: a prompt may hold any, and messages
        end on terminals.

        Raises:
            StageCrashed: The process wrote something that is no event.
        """
        if self._child is not None:
            self._memory.look(self._child.pid, at_most_every_s=TICK_S)
        poller = select.poll()
        if not self._is_silent:
            poller.register(self._event_r, select.POLLIN)
        if self._outgoing:
            poller.register(self._request_w, select.POLLOUT)
        ready = {fd for fd, _ in poller.poll(timeout_s * 1000)}
        if self._request_w in ready:
            try:
                self._outgoing = self._outgoing[os.write(self._request_w, self._outgoing) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:  # it is dying: its end is seen on the event pipe
                self._outgoing = b""
        if self._event_r not in ready:
            return []
        chunk = os.read(self._event_r, MAX_PACKET_BYTES)
        self._is_silent = not chunk
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        try:
            events = [_without_controls(EVENTS.validate_json(line)) for line in lines]
        except ValueError as error:
            raise StageCrashed(
                f"phase {self.stage} wrote a line that is no event: {error}"
            ) from error
        self.is_ready = self.is_ready or bool(events)
        return events

    def is_over(self) -> bool:
        """Whether the process is dead or dying and no event is left to read."""
        if self._is_silent or self._child is None:
            return True
        poller = select.poll()
        poller.register(self._event_r, select.POLLIN)
        state = dict(poller.poll(0)).get(self._event_r, 0)
        if state & select.POLLIN:
            return False
        return bool(state & select.POLLHUP) or self._child.exited.done()

    def wait(self, timeout_s: float) -> bool:
        """Whether the process is gone and reaped, after `timeout_s` at most."""
        return self._child is None or not futures.wait([self._child.exited], timeout_s).not_done

    def retire(self, grace_s: float) -> None:
        """End an idle process: close its request pipe, then as `terminate`."""
        fd, self._request_w = self._request_w, -1
        os.close(fd)
        if not self.wait(grace_s):
            self.terminate(grace_s)

    def terminate(self, grace_s: float) -> None:
        """End the process group by SIGTERM, and after `grace_s` by SIGKILL."""
        if self._child is not None:
            self._child.signal_group(signal.SIGTERM)
            self.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """End the process group now, and wait until the process is reaped."""
        if self._child is not None:
            self._child.signal_group(signal.SIGKILL)
        with suppress(IndexError):
            os.close(self._lifeline.pop())
        if not self.wait(KILL_WAIT_S):
            logging.getLogger("exeunt.launch").error(
                "phase %s: process %s is still there %g s after SIGKILL; its device memory may "
                "not be free",
                self.stage,
                self._child and self._child.pid,
                KILL_WAIT_S,
            )

    def release(self) -> None:
        """Close every pipe; a process that is still starting dies of it."""
        self.close_child_fds()
        with suppress(IndexError):
            os.close(self._lifeline.pop())
        for fd in (self._request_w, self._event_r):
            if fd >= 0:
                os.close(fd)
        self._request_w = self._event_r = -1
        self._is_silent = True
        if self._child is not None:
            self._log.finish()

    def crash_message(self) -> str:
        """How the process died, for people; waits until it is reaped."""
        child = self._child
        assert child is not None
        code = None
        if not self.wait(KILL_WAIT_S):
            how = "closed its event pipe but did not end"
        elif (code := child.exited.result()) is None:
            how = "ended together with the fork server"
        elif code < 0:
            how = f"killed by signal {-code} ({signal_name(-code)})"
        else:
            how = f"ended with exit code {code} ({EXIT_MEANINGS.get(code, 'of its own')})"
        memory = self._memory.verdict(is_killed=code == -signal.SIGKILL)
        return f"phase {self.stage} {how}{memory}{self._log.last_lines()}"


def wait_for_process(future: futures.Future[T], stage: str, is_cancelled: Callable[[], bool]) -> T:
    """The future's result, while a session may be closed at any time.

    Raises:
        StageCancelled: `is_cancelled` became true.
        TimeoutError: There is none after `START_TIMEOUT_S`.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while futures.wait([future], TICK_S).not_done:
        if is_cancelled():
            raise StageCancelled(f"phase {stage} was cancelled while its process started")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no process within {START_TIMEOUT_S:g} s")
    return future.result()


class LogLines:
    """Turns a process's output into log lines, and remembers the last ones.

    A thread of its own reads, so that a stage is never stopped by a full pipe for long.
    """

    def __init__(self, fd: int, logger: Logger) -> None:
        self._fd = fd
        self._logger = logger
        self._last: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="exeunt-log", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait a moment for the last lines: a process outside the group may hold the pipe."""
        self._thread.join(1.0)

    def last_lines(self) -> str:
        """The last lines, as the end of a message; empty without any."""
        self.finish()
        lines = list(self._last)
        return (
            "".join(["; its last lines:", *(f"\n  {line[:500]}" for line in lines)])
            if lines
            else ""
        )

    def _read(self) -> None:
        rest = b""
        with os.fdopen(self._fd, "rb", buffering=0) as pipe:
            while chunk := pipe.read(MAX_PACKET_BYTES):
                *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
                while len(rest) > MAX_LINE_BYTES:
                    lines.append(rest[:MAX_LINE_BYTES])
                    rest = rest[MAX_LINE_BYTES:]
                for line in lines:
                    self._log(line)
            self._log(rest)

    def _log(self, line: bytes) -> None:
        text = printable(line.decode("utf-8", "backslashreplace"))
        if text.strip():
            self._last.append(text)
            self._logger.info("%s", text)


def printable(text: str) -> str:
    """Text whose control characters, but for tab and newline, are escaped."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _without_controls(event: Event) -> Event:
    if isinstance(event, Progress | Warn | Failed):
        return event.model_copy(update={"message": printable(event.message)})
    return event


def signal_name(signum: int) -> str:
    """Such as `SIGKILL`; a real-time signal has no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "unnamed"

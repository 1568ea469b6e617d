"""The fork server, seen from its launcher: fork orders go down, forks and ends come back."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress

from flows.stage_process import (
    KILL_WAIT_S,
    Child,
    Logger,
    LogLines,
    StageProcess,
    signal_name,
    wait_for_process,
)
from stages.protocol import (
    EXIT_MEANINGS,
    MAX_PACKET_BYTES,
    NOTICES,
    Exited,
    Fork,
    Forked,
    Refused,
    Serving,
    Signal,
)

Start = Callable[[Sequence[str], int, Sequence[int]], futures.Future[subprocess.Popen[bytes]]]
"""Starts a module: its arguments, its output, and the descriptors that it keeps."""


class ForkServerLost(Exception):
    """The fork server cannot make this process; the message says why."""


class ForkServer:
    """A running `stages.forkserver` and the children that it made.

    Args:
        start: Starts its process.
        preload: What it imports, as `module` or `module:name`; None for its own list.
    """

    def __init__(self, start: Start, preload: Sequence[str] | None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.RLock()  # guards what follows, and the order of orders
        self._orders: deque[futures.Future[Child]] = deque()
        self._exits: dict[int, futures.Future[int | None]] = {}
        self._end = ""
        self._is_serving = False
        log_r, log_w = os.pipe()
        self._log = LogLines(log_r, logging.getLogger("exeunt.forkserver"))
        arguments = ["stages.forkserver", "--socket-fd", str(theirs.fileno())]
        if preload is not None:
            arguments += ["--preload", *preload]
        self._child = start(arguments, log_w, [theirs.fileno()])

        def close_theirs(_: object) -> None:
            theirs.close()
            os.close(log_w)

        self._child.add_done_callback(close_theirs)
        self._listener = threading.Thread(
            target=self._listen, name="exeunt-forkserver", daemon=True
        )
        self._listener.start()

    def fork(self, stage: str, fds: Sequence[int]) -> futures.Future[Child]:
        """Order a child with these descriptors; the answer comes after the server's imports.

        Raises:
            ForkServerLost: The server has ended; from the future, also that it refuses.
        """
        child: futures.Future[Child] = futures.Future()
        with self._lock:
            if self._end:
                raise ForkServerLost(self._end)
            try:
                socket.send_fds(self._control, [Fork(stage=stage).model_dump_json().encode()], fds)
            except OSError as error:
                raise ForkServerLost(f"the fork server takes no order: {error.strerror}") from error
            self._orders.append(child)
        return child

    def close(self) -> None:
        """End the server and its children; safe to call twice."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(OSError, subprocess.SubprocessError):
            child = self._child.result()
            if not self._is_serving:  # it would notice only after its imports; it has no child
                child.kill()
            try:
                child.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
        self._listener.join()
        self._log.finish()

    def _listen(self) -> None:
        try:
            child = self._child.result()
            while packet := self._receive():
                self._note(packet)
            code = child.wait()
            reason = EXIT_MEANINGS.get(code) or (
                f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            )
            end = f"the fork server has ended: {reason}{self._log.last_lines()}"
        except (OSError, subprocess.SubprocessError) as error:
            end = f"the fork server cannot be started: {error}"
        except (ValueError, LookupError) as error:
            end = f"the fork server sent a message that makes no sense: {error}"
        with self._lock:
            self._end = end
            self._control.close()
            orders, exits = list(self._orders), list(self._exits.values())
        for order in orders:
            order.set_exception(ForkServerLost(end))
        for exited in exits:
            exited.set_result(None)

    def _receive(self) -> bytes:
        try:
            return self._control.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            return b""

    def _note(self, packet: bytes) -> None:
        notice = NOTICES.validate_json(packet)
        if isinstance(notice, Serving):
            self._is_serving = True
            logging.getLogger("exeunt.launch").debug(
                "the fork server has its libraries after %.1f s", notice.elapsed_s
            )
        elif isinstance(notice, Refused):
            self._orders.popleft().set_exception(
                ForkServerLost(f"the fork server does not fork: {notice.reason}")
            )
        elif isinstance(notice, Forked):
            exited: futures.Future[int | None] = futures.Future()
            with self._lock:
                self._exits[notice.pid] = exited
                child = self._orders.popleft()
            child.set_result(Child(notice.pid, exited, lambda n: self._signal(notice.pid, n)))
        elif isinstance(notice, Exited):
            with self._lock:
                exited = self._exits.pop(notice.pid)
            exited.set_result(notice.exit_code)

    def _signal(self, pid: int, signum: int) -> None:
        with self._lock, suppress(OSError):  # a lost server's children die of their guards
            if pid in self._exits and not self._end:
                self._control.send(Signal(pid=pid, signum=signum).model_dump_json().encode())


def fork_process(
    server: ForkServer, stage: str, logger: Logger, is_cancelled: Callable[[], bool]
) -> StageProcess:
    """Have the server make a process for a stage; waits for the server's imports.

    Raises:
        ForkServerLost: It did not.
        StageCancelled: `is_cancelled` became true.
    """
    process = StageProcess(stage, logger)
    try:
        child = server.fork(stage, process.child_fds)
        process.close_child_fds()
        process.adopt(wait_for_process(child, stage, is_cancelled))
    except TimeoutError as error:
        process.release()
        raise ForkServerLost(f"the fork server made {error}") from error
    except BaseException:
        process.release()
        raise
    return process

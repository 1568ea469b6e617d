"""Make stage processes, by a fork server or by spawning an interpreter.

Each child holds the read end of a *lifeline*, a pipe without data whose write end only this
process holds: when it closes, for whatever reason, the kernel kills the child's whole process
group.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self, TypeVar

from flows.stage_process import (
    KILL_WAIT_S,
    TICK_S,
    Child,
    Logger,
    LogLines,
    StageProcess,
    signal_name,
)
from stages import contracts
from stages.errors import StageCancelled, StageCrashed
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

T = TypeVar("T")

START_TIMEOUT_S = 120.0


class Launcher:
    """Makes stage processes; one per flow process, shared by its sessions and threads.

    Args:
        method: `forkserver`, or `spawn` for a new interpreter per process.
        preload: What the fork server imports, as `module` or `module:name`; None for its own
            list.
        environ: Added to the environment of every process made here. The rest of it, and
            the working folder, are this process's at the time of this call.

    Attributes:
        method: Becomes `spawn` when the fork server is lost.
        num_processes_started: Children made so far, by stage.
    """

    def __init__(
        self,
        method: Literal["forkserver", "spawn"] = "forkserver",
        *,
        preload: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.method = method
        self.num_processes_started: Counter[str] = Counter()
        self._preload = preload
        self._lock = threading.Lock()  # guards _server, method and the counter
        self._server: ForkServer | None = None
        self._is_closed = False
        self._spawner = Spawner(environ or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start_fork_server(self) -> None:
        """Start the fork server unless it runs; returns at once, its imports go on beside."""
        with self._lock:
            if self.method == "forkserver" and self._server is None:
                self._server = ForkServer(self._spawner, self._preload)

    def start(self, stage: str, logger: Logger, is_cancelled: Callable[[], bool]) -> StageProcess:
        """Make a process for a stage; waits for the fork server's imports.

        Raises:
            StageCancelled: `is_cancelled` became true, or the launcher is closed.
            StageCrashed: No process can be made.
        """
        if self._is_closed:
            raise StageCancelled(f"phase {stage} cannot start: its launcher is closed")
        self.start_fork_server()
        server = self._server
        process = None
        if server is not None and self.method == "forkserver":
            try:
                process = _fork(server, stage, logger, is_cancelled)
            except ForkServerLost as lost:
                self._give_up_forking(str(lost))
        if process is None:
            process = self._spawn(stage, logger, is_cancelled)
        with self._lock:
            self.num_processes_started[stage] += 1
        return process

    def close(self) -> None:
        """End the fork server, and with it every child that a session still holds."""
        with self._lock:
            self._is_closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self._spawner.close()

    def _spawn(self, stage: str, logger: Logger, is_cancelled: Callable[[], bool]) -> StageProcess:
        future = self._spawner.submit(_spawn_here, self._spawner, stage, logger)
        try:
            return _wait(future, stage, is_cancelled)
        except (OSError, subprocess.SubprocessError) as error:
            raise StageCrashed(f"phase {stage} cannot be started: {error}") from error
        except BaseException:
            future.add_done_callback(_abandon)
            raise

    def _give_up_forking(self, reason: str) -> None:
        with self._lock:
            is_news = self.method == "forkserver"
            self.method = "spawn"  # the server itself stays: it may have children that work
        if is_news:
            logging.getLogger("exeunt.launch").warning(
                "%s; each stage process starts as a new interpreter from now on", reason
            )


class Spawner:
    """The one thread that starts Python processes, in one environment and one folder.

    The kernel signals a child when the *thread* that made it ends, so this one lives as long
    as its launcher. A caller's thread, such as a task's, may end at any time.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = _child_environ(environ)
        self._folder = Path.cwd()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="exeunt-spawner")
        self.submit = self._thread.submit

    def popen(
        self, arguments: Sequence[str], log_w: int, fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start one of this project's modules; to be submitted.

        Args:
            arguments: The module and its arguments.
            log_w: Becomes its standard output and error. Borrowed.
            fds: Other descriptors that it keeps, under the same numbers. Borrowed.
        """
        # -P: a file in the working folder must not take the place of a library.
        command = [sys.executable, "-P", "-u", "-m", *arguments, "--parent-pid", str(os.getpid())]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_w,
            stderr=log_w,
            pass_fds=fds,
            env=self._environ,
            cwd=self._folder,
            start_new_session=True,
        )

    def close(self) -> None:
        self._thread.shutdown()


def _child_environ(extra: Mapping[str, str]) -> dict[str, str]:
    environ = {**os.environ, **extra}
    root = Path(contracts.__file__).parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        # A checkout that this process found by its own sys.path: children look there too.
        paths = [str(root), *filter(None, [environ.get("PYTHONPATH")])]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    return environ


def _wait(future: futures.Future[T], stage: str, is_cancelled: Callable[[], bool]) -> T:
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


def _spawn_here(spawner: Spawner, stage: str, logger: Logger) -> StageProcess:
    process = StageProcess(stage, logger)
    try:
        request_r, event_w, log_w, lifeline_r = process.child_fds
        fds = {"--request-fd": request_r, "--event-fd": event_w, "--lifeline-fd": lifeline_r}
        options = [text for name, fd in fds.items() for text in (name, str(fd))]
        child = spawner.popen(["stages.worker", stage, *options], log_w, list(fds.values()))
        process.adopt(_reaped(child))
    except BaseException:
        process.release()
        raise
    process.close_child_fds()
    return process


def _abandon(future: futures.Future[StageProcess]) -> None:
    """Let go of a process that nobody waits for any more: its lifeline closes."""
    with suppress(futures.CancelledError, OSError, subprocess.SubprocessError):
        future.result().release()


def _reaped(child: subprocess.Popen[bytes]) -> Child:
    """Give a spawned child a thread that waits for its end and then ends its group."""
    exited: futures.Future[int | None] = futures.Future()
    # Guards the time between "still unreaped" and the signal. Reentrant, as is every lock that
    # `StageSession.close` takes: it may run in a signal handler over a holder.
    lock = threading.RLock()

    def reap() -> None:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with lock:
            # While the leader is a zombie, its group's number cannot be another's.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            exited.set_result(child.wait())

    def signal_group(signum: int) -> None:
        with lock:
            if not exited.done():
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signum)

    threading.Thread(target=reap, name="exeunt-reaper", daemon=True).start()
    return Child(child.pid, exited, signal_group)


# ---- the fork server, seen from here -------------------------------------------------------


class ForkServerLost(Exception):
    """The fork server cannot make this process; the message says why."""


def _fork(
    server: ForkServer, stage: str, logger: Logger, is_cancelled: Callable[[], bool]
) -> StageProcess:
    process = StageProcess(stage, logger)
    try:
        child = server.fork(stage, process.child_fds)
        process.close_child_fds()
        process.adopt(_wait(child, stage, is_cancelled))
    except TimeoutError as error:
        process.release()
        raise ForkServerLost(f"the fork server made {error}") from error
    except BaseException:
        process.release()
        raise
    return process


class ForkServer:
    """A running `stages.forkserver`: fork orders go down, forks and ends come back."""

    def __init__(self, spawner: Spawner, preload: Sequence[str] | None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.RLock()  # guards what follows, and the order of orders
        self._orders: deque[futures.Future[Child]] = deque()
        self._exits: dict[int, futures.Future[int | None]] = {}
        self._end = ""
        self._is_serving = False
        log_r, log_w = os.pipe()
        self._log = LogLines(log_r, logging.getLogger("exeunt.forkserver"))
        self._child = spawner.submit(self._start, spawner, preload, theirs, log_w)
        self._listener = threading.Thread(
            target=self._listen, name="exeunt-forkserver", daemon=True
        )
        self._listener.start()

    @staticmethod
    def _start(
        spawner: Spawner, preload: Sequence[str] | None, theirs: socket.socket, log_w: int
    ) -> subprocess.Popen[bytes]:
        arguments = ["stages.forkserver", "--socket-fd", str(theirs.fileno())]
        if preload is not None:
            arguments += ["--preload", *preload]
        try:
            return spawner.popen(arguments, log_w, [theirs.fileno()])
        finally:
            theirs.close()
            os.close(log_w)

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

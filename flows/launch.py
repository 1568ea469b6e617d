"""Make stage processes, by a fork server or by spawning an interpreter.

Each child holds the read end of a *lifeline*, a pipe without data whose write end only this
process holds: when it closes, for whatever reason, the kernel kills the child's whole process
group.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self

from flows.fork_client import ForkServer, ForkServerLost, fork_process
from flows.stage_process import Child, Logger, StageProcess, wait_for_process
from stages import contracts
from stages.errors import StageCancelled, StageCrashed
from stages.preload import preload_names


class Launcher:
    """Makes stage processes; one per flow process, shared by its sessions and threads.

    Args:
        method: `forkserver`, or `spawn` for a new interpreter per process.
        preload: What the fork server imports, as `module` or `module:name`; None for what all
            stages need, and the families that are expected besides.
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
        self._families: list[str] = []
        self._lock = threading.Lock()  # guards _server, _families, method and the counter
        self._server: ForkServer | None = None
        self._is_closed = False
        self._spawner = Spawner(environ or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, family: str) -> None:
        """Say that stages will serve a family, for a fork server that is yet to start.

        One that runs serves every family; what it did not import costs the stage's time.

        Raises:
            RequestError: The family is unknown.
        """
        with self._lock:
            if family not in self._families:
                preload_names(family)
                self._families.append(family)

    def start_fork_server(self) -> None:
        """Start the fork server unless it runs; returns at once, its imports go on beside."""
        with self._lock:
            if self.method == "forkserver" and self._server is None:
                if self._preload is None:
                    self._preload = preload_names(*self._families)
                self._server = ForkServer(self._spawner.start, self._preload)

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
                process = fork_process(server, stage, logger, is_cancelled)
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
            return wait_for_process(future, stage, is_cancelled)
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


@lru_cache(maxsize=1)
def shared_launcher(method: Literal["forkserver", "spawn"]) -> Launcher:
    """The launcher of this process, made at the first call and closed when the process ends."""
    launcher = Launcher(method)
    atexit.register(launcher.close)
    return launcher


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

    def start(
        self, arguments: Sequence[str], log_w: int, fds: Sequence[int]
    ) -> futures.Future[subprocess.Popen[bytes]]:
        """Submit `popen`; its descriptors have to stay open until it is done."""
        return self.submit(self.popen, arguments, log_w, fds)

    def popen(
        self, arguments: Sequence[str], log_w: int, fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """Start one of this project's modules; runs in the spawner's thread.

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

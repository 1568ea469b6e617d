"""Makes stage processes by fork, from a process that has imported everything they need.

The server imports the libraries once, runs no operation, makes no CUDA call and stays on one
thread; each fork of it is then a fresh process that is ready in milliseconds. The launcher
asks through a socket, and sends the new child's descriptors along.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from stages import worker
from stages.contracts import Record
from stages.cuda_state import is_cuda_initialised
from stages.preload import preload_names
from stages.protocol import (
    EXIT_DONE,
    EXIT_WORKER_BUG,
    MAX_PACKET_BYTES,
    ORDERS,
    Exited,
    Fork,
    Forked,
    Refused,
    Serving,
)

HARMLESS_THREADS = ("cuda",)
"""Starts of the names of threads that do not stand in the way of a fork."""

HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)


def preload(names: Sequence[str]) -> None:
    """Import each name; one that fails costs its stage time, not the server its life."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            loaded = importlib.import_module(module)
            if attribute:
                getattr(loaded, attribute)
        except Exception as error:
            print(f"cannot preload {name}: {type(error).__name__}: {error}", flush=True)


class ForkServer:
    """Forks children for one launcher, reaps them and reports their ends.

    Invariants: one thread, but for the management library's; no descriptor of a child stays open
    here; a child's process group is killed while its leader is still unreaped, so that its
    number cannot be another's.

    Args:
        control: The launcher's socket.
        obstacle: Why forks would be of no use; every order for one is then refused.
    """

    def __init__(self, control: socket.socket, obstacle: str = "") -> None:
        self._control = control
        self._obstacle = obstacle
        self._children: set[int] = set()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        for signum in HANDLED:
            signal.signal(signum, lambda *_: None)  # the wake-up pipe tells which came
        signal.set_wakeup_fd(self._wake_w)

    def serve(self) -> None:
        """Obey until the launcher closes its socket, dies, or asks this process to end."""
        poller = select.poll()
        poller.register(self._wake_r, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        self._tell(Serving(elapsed_s=worker.process_age_s()))
        try:
            while True:
                ready = {fd for fd, _ in poller.poll()}
                if self._wake_r in ready:
                    signals = os.read(self._wake_r, 4096)
                    if signal.SIGTERM in signals or signal.SIGHUP in signals:
                        return
                    self._reap(os.WNOHANG)
                if self._control.fileno() in ready and not self._obey():
                    return
        finally:
            self._end_children()

    def _obey(self) -> bool:
        """Do the next order; False when the launcher has hung up."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 4)
        except ConnectionError:
            return False
        if not packet:
            return False
        order = ORDERS.validate_json(packet)
        if isinstance(order, Fork):
            try:
                self._tell(self._fork(order.stage, fds))
            finally:
                for fd in fds:
                    os.close(fd)
        elif order.pid in self._children:
            _signal_group(order.pid, order.signum)
        return True

    def _fork(self, stage: str, fds: Sequence[int]) -> Forked | Refused:
        if self._obstacle:
            return Refused(reason=self._obstacle)
        if threads := foreign_threads():
            return Refused(reason=f"its process has further threads: {', '.join(threads)}")
        parent_pid = os.getpid()
        # Until the child has handlers of its own, a signal meant for it would wake the server.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                self._be_child(stage, fds, parent_pid)
        except OSError as error:
            return Refused(reason=f"fork failed: {error.strerror}")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._children.add(pid)
        return Forked(pid=pid)

    def _be_child(self, stage: str, fds: Sequence[int], parent_pid: int) -> NoReturn:
        """In the child: let go of everything of the server's, then live as a stage process."""
        try:
            signal.set_wakeup_fd(-1)
            for signum in HANDLED:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            request_fd, event_fd, log_fd, lifeline_fd = fds
            os.dup2(log_fd, sys.stdout.fileno())
            os.dup2(log_fd, sys.stderr.fileno())
            for fd in (log_fd, self._wake_r, self._wake_w, self._control.fileno()):
                os.close(fd)
            gc.enable()
            if "numpy" in sys.modules:  # Python's own generator reseeds itself after a fork
                sys.modules["numpy"].random.seed()
            worker.live(
                stage,
                request_fd=request_fd,
                event_fd=event_fd,
                lifeline_fd=lifeline_fd,
                parent_pid=parent_pid,
            )
        finally:
            os._exit(EXIT_WORKER_BUG)  # never back into the server's loop

    def _reap(self, options: int) -> None:
        """Reap children and report each; with `os.WNOHANG`, only those that have ended."""
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if ended is None:
                return
            _signal_group(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            self._children.remove(ended.si_pid)
            self._tell(Exited(pid=ended.si_pid, exit_code=os.waitstatus_to_exitcode(status)))

    def _end_children(self) -> None:
        for pid in self._children:
            _signal_group(pid, signal.SIGKILL)
        self._reap(0)  # not every container has an init that reaps

    def _tell(self, notice: Record) -> None:
        with suppress(ConnectionError):  # the next poll sees that the launcher has hung up
            self._control.send(notice.model_dump_json().encode())


def foreign_threads() -> list[str]:
    """Names of this process's threads that a fork must not leave behind.

    A thread that is gone in the child may have held a lock there for ever. One is let pass:
    torch counts devices through the driver's management library, which starts a thread of its
    own and initialises no CUDA. Children of such a process were measured to compute on the
    device as fresh processes do (`tests/benchmarks/gpu_chain.py`).
    """
    found = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with suppress(OSError):  # it has just ended
                found.append((task / "comm").read_text().strip())
    return [name for name in found if not name.startswith(HARMLESS_THREADS)]


def obstacle_to_forks() -> str:
    """Why forks of this process could not use a GPU; empty if they can."""
    if not is_cuda_initialised():
        return ""
    return (
        "a library that it imported has initialised CUDA, so that no fork of it could use a GPU "
        "(optimum-quanto does so); uninstall that library where it is not needed"
    )


def _signal_group(pid: int, signum: int) -> None:
    """Signal the group of an unreaped child, or the child alone before it has its group."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        os.kill(pid, signum)


def main() -> NoReturn:
    """Be a fork server; the launcher writes this command line."""
    parser = argparse.ArgumentParser(prog="python -m stages.forkserver")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--preload", nargs="*", default=preload_names(), metavar="MODULE[:NAME]")
    arguments = parser.parse_args()
    os.set_inheritable(arguments.socket_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # While it imports there is no child to take along, and an import may not be interruptible.
    worker.die_with_parent(arguments.parent_pid, signal.SIGKILL)
    worker.prepare_environment()
    gc.disable()  # a collection would write to pages that the children share
    preload(arguments.preload)
    gc.collect()
    gc.freeze()
    server = ForkServer(socket.socket(fileno=arguments.socket_fd), obstacle_to_forks())
    worker.die_with_parent(arguments.parent_pid, signal.SIGHUP)
    server.serve()
    worker.leave(EXIT_DONE)


if __name__ == "__main__":
    main()

"""Processes that outlive the command that starts them, told apart from later namesakes.

This module loads no Prefect. It reads `/proc`, as the rest of Exeunt does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_LOG_NBYTES = 8 * 2**20
_POLL_S = 0.02

# Runs between fork and exec of a background process, where a thread of ours might hold a lock
# that Python code needs; hence an interpreter of its own, which takes about 15 ms.
_DETACH = """
import os, signal, sys
log, folder = int(sys.argv[1]), sys.argv[2]
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
os.setsid()
os.chdir(folder)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(log, 1)
os.dup2(log, 2)
# A shell's "&" leaves SIGINT ignored, and whoever starts us may have blocked signals; a Prefect
# worker that inherits either cannot be stopped.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundProcess:
    """One process and nobody after it: numbers are used again, also after a reboot.

    Attributes:
        pid: Process id; also its process group and session.
        start_ticks: When it started, in clock ticks since boot.
        boot_id: The kernel's name for the time since boot.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> BackgroundProcess | None:
        """The process that has this number now; None if there is none or it is a zombie."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid=pid, start_ticks=ticks, boot_id=_boot_id())

    @classmethod
    def from_json(cls, document: Any) -> BackgroundProcess:
        """What `to_json` gave.

        Raises:
            ValueError: It is something else.
        """
        try:
            return cls(
                pid=int(document["pid"]),
                start_ticks=int(document["start_ticks"]),
                boot_id=str(document["boot_id"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a background process: {document!r}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain values, to be kept in a file."""
        return asdict(self)

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_ticks(self.pid) == self.start_ticks and _boot_id() == self.boot_id

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to its group, SIGKILL after the grace; returns when the group is gone.

        A process that is already gone is fine, and so is one of another user's that has got
        its number since: that one is left alone.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The leader may be gone and its children not; while they live, the kernel gives
            # the number of their group to nobody else.
            if _boot_id() != self.boot_id or _start_ticks(self.pid) not in (None, self.start_ticks):
                return
            self._signal_group(number)
            deadline = time.monotonic() + grace_s
            while _group_lives(self.pid):
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
            else:
                return

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def start_in_background(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    log: Path,
    pass_fds: Sequence[int] = (),
) -> BackgroundProcess:
    """Start a command in a session of its own, with default signal handling.

    It is nobody's child: it lives on when this process ends, and leaves no zombie behind.

    Args:
        command: Program by absolute path, and arguments.
        env: Its whole environment.
        folder: Its working directory.
        log: Gets its output, appended; moved aside beforehand when it has grown too big.
        pass_fds: Descriptors that it has as well, by the same numbers.

    Raises:
        OSError: The log cannot be written, or the process ended at once.
    """
    with suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_NBYTES:
            log.replace(log.with_suffix(f"{log.suffix}.old"))
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        detach = [sys.executable, "-I", "-S", "-c", _DETACH, str(log_fd), str(folder)]
        fds = (log_fd, *pass_fds)
        started = subprocess.run(
            [*detach, *command], env=env, pass_fds=fds, stdout=subprocess.PIPE, check=True
        )
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} was not started: status {error.returncode}") from error
    finally:
        os.close(log_fd)
    if (process := BackgroundProcess.of(int(started.stdout))) is None:
        raise OSError(f"{command[0]} ended at once; see {log}")
    return process


def last_lines(log: Path, num_lines: int = 5) -> str:
    """The end of a log, for an error message; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-num_lines:])


def _start_ticks(pid: int) -> int | None:
    fields = _stat_fields(Path("/proc", str(pid)))
    return None if fields is None else int(fields[19])


def _group_lives(group: int) -> bool:
    """Whether a process group has a member that is no zombie."""
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat_fields(folder)
        if fields is not None and int(fields[2]) == group:
            return True
    return False


def _stat_fields(folder: Path) -> list[str] | None:
    """A living process's `stat` from its state on; None for a zombie, or if there is none."""
    try:
        text = (folder / "stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else fields


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

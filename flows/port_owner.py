"""Whose port it is: whether a process, or one of its group, listens there (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"  # of the states in /proc/net/tcp


def listens(group: int, port: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process of this group listens on a TCP port of this machine.

    True where the kernel does not tell.

    Args:
        group: Process group.
    """
    try:
        wanted = {f"socket:[{inode}]" for inode in _inodes(proc, port)}
    except OSError:
        return True
    return any(not wanted.isdisjoint(_sockets(proc / str(pid))) for pid in _members(proc, group))


def _inodes(proc: Path, port: int) -> Iterator[str]:
    """The inode of each socket that listens on a port."""
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without that version
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _members(proc: Path, group: int) -> Iterator[int]:
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                if os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)


def _sockets(process: Path) -> Iterator[str]:
    """What the descriptors of a process are; nothing for one of another user, or that has ended."""
    with suppress(OSError):
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(fd.readlink())

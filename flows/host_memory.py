"""Host memory as a cause of death: what a process may use, what it used, who was killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from stages.shown_sizes import show_nbytes


class MemoryWatch:
    """What speaks for or against host memory as the cause of a process's death."""

    def __init__(self) -> None:
        self._rss_bytes = 0
        self._looked_at = 0.0
        self._num_oom_kills = num_oom_kills()

    def look(self, pid: int, at_most_every_s: float = 0.0) -> None:
        """Note the process's resident memory."""
        now = time.monotonic()
        if now - self._looked_at >= at_most_every_s:
            self._looked_at = now
            with suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self._rss_bytes = (pages * os.sysconf("SC_PAGE_SIZE")) or self._rss_bytes

    def verdict(self, *, is_killed: bool) -> str:
        """The memory part of a crash message."""
        limit_bytes = host_memory_limit_bytes()
        facts = f"limit {show_nbytes(limit_bytes)}, last RSS {show_nbytes(self._rss_bytes)}"
        is_near = self._rss_bytes > 0.8 * limit_bytes
        if is_killed and (is_near or num_oom_kills() > self._num_oom_kills):
            return f", likely out of host memory: {facts}; raise the limit or lower the host budget"
        return f" (host memory: {facts})"


def host_memory_limit_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may use: the least of all memory and its control groups' limits."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _memory_cgroups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int((folder / name).read_text()))
    return min(limits)


def num_oom_kills(root: Path = Path("/")) -> int:
    """Out-of-memory kills so far: in this process's control group, else on the host."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _memory_cgroups(root) for name in names]
    for file in [*files, root / "proc/vmstat"]:
        with suppress(OSError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _memory_cgroups(root: Path) -> list[Path]:
    """Folders of the control groups that bound this process's memory, innermost first."""
    folders: list[Path] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / "sys/fs/cgroup" / controllers
                inner = top / group.lstrip("/")
                # A container may be told the host's path without its folders: walk up.
                folders += [f for f in (inner, *inner.parents) if f.is_relative_to(top)]
    return folders

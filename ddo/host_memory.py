"""How much host memory this process may still take: the machine's, within its control groups.

A container sees the machine's MemTotal, and is killed at its own limit. Both versions of
control groups are read, with every group above this process's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PINNED_SHARE = 0.6
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory that can still be taken, and who says so.

    Attributes:
        available_bytes: What the tightest of all limits leaves.
        limited_by: `MemAvailable`, or the folder of the control group that is tightest.
    """

    available_bytes: int
    limited_by: str


def read_host_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """What MemAvailable and the control groups of this process leave."""
    found = [HostMemory(available_bytes=_mem_available(proc), limited_by="MemAvailable")]
    for folder in _group_folders(proc, cgroups):
        if (left := _left_in(folder)) is not None:
            found.append(HostMemory(available_bytes=left, limited_by=str(folder)))
    return min(found, key=lambda memory: memory.available_bytes)


def pinnable_bytes(budget_bytes: int | None) -> int:
    """Host memory that may be pinned: the budget, or by default a part of what is left.

    A part, since pinned pages are lost to everybody else.
    """
    if budget_bytes is not None:
        return budget_bytes
    return int(read_host_memory().available_bytes * _PINNED_SHARE)


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _group_folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The groups that this process is in, each followed by those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = cgroups if (cgroups / "cgroup.controllers").exists() else cgroups / "unified"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        if not group.exists():  # in a container the path is the host's, the mount is our own
            group = root
        yield group
        while group != root and root in group.parents:
            group = group.parent
            yield group


def _left_in(group: Path) -> int | None:
    """Bytes below a group's limit, counting file pages that can be dropped; None: no limit."""
    for limit_name, usage_name, droppable_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (group / limit_name).read_text().strip()
            usage = int((group / usage_name).read_text())
            stat = (group / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return None
        droppable = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
        return max(0, int(limit) - usage + int(droppable.get(droppable_name, 0)))
    return None

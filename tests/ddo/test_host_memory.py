from __future__ import annotations

from pathlib import Path

import pytest

from ddo.host_memory import read_host_memory

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """A /proc with 1000 MiB available, and a place for control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    text = f"MemTotal: 2048000 kB\nMemAvailable: {1000 * 1024} kB\n"
    (tmp_path / "proc" / "meminfo").write_text(text)
    (tmp_path / "groups").mkdir()
    return tmp_path


def read(machine: Path):
    return read_host_memory(machine / "proc", machine / "groups")


def group_v2(machine: Path, path: str, limit: str, usage: int, inactive: int = 0) -> None:
    folder = machine / "groups" / path
    folder.mkdir(parents=True, exist_ok=True)
    (machine / "groups" / "cgroup.controllers").touch()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_without_groups_the_machine_decides(machine):
    assert read(machine).available_bytes == 1000 * MIB
    assert read(machine).limited_by == "MemAvailable"


def test_a_group_without_limit_changes_nothing(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/job\n")
    group_v2(machine, "job", "max", 5)
    assert read(machine).available_bytes == 1000 * MIB


def test_the_tightest_of_nested_groups_decides(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/slice/job\n")
    group_v2(machine, "slice", str(300 * MIB), 200 * MIB)
    group_v2(machine, "slice/job", str(800 * MIB), 100 * MIB)
    assert read(machine).available_bytes == 100 * MIB
    assert read(machine).limited_by.endswith("groups/slice")


def test_file_pages_that_can_be_dropped_count_as_free(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/job\n")
    group_v2(machine, "job", str(300 * MIB), 250 * MIB, inactive=200 * MIB)
    assert read(machine).available_bytes == 250 * MIB


def test_in_a_container_the_mount_is_the_group_itself(machine):
    (machine / "proc" / "self" / "cgroup").write_text("0::/docker/abc\n")
    group_v2(machine, ".", str(400 * MIB), 100 * MIB)
    assert read(machine).available_bytes == 300 * MIB


@pytest.mark.parametrize(("limit", "left"), [(500 * MIB, 450), ((1 << 63) - 4096, 1000)])
def test_version_one_groups_are_read_too(machine, limit, left):
    (machine / "proc" / "self" / "cgroup").write_text("5:cpu,memory:/job\n3:pids:/job\n")
    folder = machine / "groups" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    (folder / "memory.usage_in_bytes").write_text(str(60 * MIB))
    (folder / "memory.stat").write_text(f"total_inactive_file {10 * MIB}\n")
    assert read(machine).available_bytes == left * MIB


def test_this_machine_has_memory_left():
    assert read_host_memory().available_bytes > 0

"""What a process may use and who was killed for it, read from control groups and the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import host_memory


@pytest.mark.parametrize(
    ("group", "files", "limit", "kills"),
    [
        ("0::/job", {"job/memory.max": "1000", "job/memory.events": "oom_kill 2"}, 1000, 2),
        ("0::/job", {"job/memory.max": "max", "memory.max": "2000"}, 2000, 5),
        ("0::/host/only/path", {"memory.max": "3000"}, 3000, 5),
        (
            "4:memory:/job",
            {"memory/job/memory.limit_in_bytes": "4000", "memory/memory.oom_control": "oom_kill 1"},
            4000,
            1,
        ),
    ],
)
def test_the_memory_limit_is_the_least_of_all_control_groups(
    tmp_path: Path, group: str, files: dict[str, str], limit: int, kills: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**files, "proc/self/cgroup": group, "proc/vmstat": "oom_kill 5"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")

    assert host_memory.host_memory_limit_bytes(tmp_path) == limit
    assert host_memory.num_oom_kills(tmp_path) == kills

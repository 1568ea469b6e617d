"""Become an unprivileged user for a moment, where the tests run as root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def nobody(umask: int = 0o022) -> Iterator[None]:
    """Do what follows as an unprivileged user."""
    groups, before = os.getgroups(), os.umask(umask)
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)


def open_to_others(folder: Path) -> Path:
    """Let other users into a folder of pytest's, which are closed to all but their owner."""
    parent = folder
    while parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
        parent.chmod(parent.stat().st_mode | 0o055)
        parent = parent.parent
    return folder

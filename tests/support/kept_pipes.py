"""The pipeline that a stage process keeps, in the process of the tests."""

from __future__ import annotations

from stages import execute


def drop_kept() -> None:
    """Forget it, as the end of a process does."""
    while execute._KEPT:
        execute._KEPT.pop().placement.detach()

"""This process's one launcher: a fork server that every phase of every run shares."""

from __future__ import annotations

import atexit
from functools import lru_cache
from typing import Literal

from flows.launch import Launcher


@lru_cache(maxsize=1)
def shared_launcher(method: Literal["forkserver", "spawn"]) -> Launcher:
    """The launcher of this process, made at the first call and closed when the process ends."""
    launcher = Launcher(method)
    atexit.register(launcher.close)
    return launcher

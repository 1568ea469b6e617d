"""What is remembered of the local server between the commands that use it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.background import BackgroundProcess
from flows.ports import HOST
from flows.settings import Home


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """What `<home>/prefect/server.json` remembers of the local server.

    Attributes:
        port: Kept from start to start, so that bookmarks of the UI stay valid.
        version: Of the Prefect that it runs.
        started_s: Seconds since 1970.
        was_healthy: Whether it has answered since it was started.
        was_stopped: Whether the user has stopped it, so that no run starts it by itself.
    """

    process: BackgroundProcess
    port: int
    version: str
    started_s: float
    was_healthy: bool = False
    was_stopped: bool = False

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.port}/api"


def state_path(home: Home) -> Path:
    """Where the state is kept."""
    return home.prefect / "server.json"


def log_path(home: Home) -> Path:
    """Where the local server's output goes."""
    return home.prefect / "server.log"


def read_state(home: Home) -> ServerState | None:
    """What is remembered of the local server, which may be long gone."""
    try:
        document = json.loads(state_path(home).read_text())
        return ServerState(
            process=BackgroundProcess.from_json(document["process"]),
            port=int(document["port"]),
            version=str(document["version"]),
            started_s=float(document["started_s"]),
            was_healthy=bool(document["was_healthy"]),
            was_stopped=bool(document.get("was_stopped")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_state(home: Home, state: ServerState) -> None:
    """Remember a state; readers see it whole or not at all."""
    document: dict[str, Any] = {
        "process": state.process.to_json(),
        "port": state.port,
        "version": state.version,
        "started_s": state.started_s,
        "was_healthy": state.was_healthy,
        "was_stopped": state.was_stopped,
    }
    path = state_path(home)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(path)


@contextmanager
def locked(home: Home) -> Iterator[None]:
    """Held for the milliseconds between looking for a server and having noted a new one."""
    fd = os.open(home.prefect / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)

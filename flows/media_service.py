"""The server of pictures that stands beside the local Prefect server: started, found, stopped.

It is there for Prefect's pages alone, and ends by itself when the Prefect server is gone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.background import BackgroundProcess, start_in_background
from flows.ports import HOST, listener
from flows.prefect_profile import user_settings
from flows.server_state import locked, read_state
from flows.settings import Home

logger = logging.getLogger(__name__)

FIRST_PORT, LAST_PORT = 4301, 4399
_STOP_GRACE_S = 2.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaState:
    """What `<home>/prefect/media.json` remembers of the server of pictures.

    Attributes:
        port: Kept from start to start, so that links in old runs stay valid.
        store_url: The one store that it serves.
    """

    process: BackgroundProcess
    port: int
    store_url: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def begin_media(home: Home, store_url: str, env: Mapping[str, str] | None = None) -> None:
    """Start the server of pictures beside a local Prefect server with pages, unless it runs.

    Does not wait for it: what is asked of it meanwhile is answered as soon as it runs. One that
    cannot start is no error, since runs need none.
    """
    env = os.environ if env is None else env
    server = read_state(home)
    if server is None or not server.process.is_alive() or not _has_pages(env):
        return  # nothing would show its pictures
    try:
        with locked(home):
            _start(home, store_url, env)
    except OSError as error:
        logger.warning("Prefect's pages will show no pictures: %s", error)


def media_url(home: Home, store_url: str) -> str | None:
    """Where pictures of a store are served, such as `http://127.0.0.1:4301`; None if nowhere."""
    state = read_media_state(home)
    if state is None or state.store_url != store_url or not state.process.is_alive():
        return None
    return state.url


def stop_media(home: Home) -> bool:
    """Stop the server of pictures; whether there was one."""
    state = read_media_state(home)
    if state is None or not state.process.is_alive():
        return False
    state.process.stop(_STOP_GRACE_S)
    return True


def read_media_state(home: Home) -> MediaState | None:
    """What is remembered of the server of pictures, which may be long gone."""
    try:
        document = json.loads(_path(home).read_text())
        return MediaState(
            process=BackgroundProcess.from_json(document["process"]),
            port=int(document["port"]),
            store_url=str(document["store_url"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def media_log_path(home: Home) -> Path:
    return home.prefect / "media.log"


def _start(home: Home, store_url: str, env: Mapping[str, str]) -> None:
    state = read_media_state(home)
    if state is not None and state.process.is_alive():
        if state.store_url == store_url:
            return
        state.process.stop(_STOP_GRACE_S)  # the newest run's pictures are looked at
    command = [sys.executable, "-m", "flows.media_server", "--home", str(home.root)]
    with listener(FIRST_PORT, LAST_PORT, None if state is None else state.port) as socket:
        port = socket.getsockname()[1]
        process = start_in_background(
            [*command, "--store", store_url, "--listener", str(socket.fileno())],
            env={**env, "PYTHONPATH": os.pathsep.join([str(_ROOT), env.get("PYTHONPATH", "")])},
            folder=home.prefect,
            log=media_log_path(home),
            pass_fds=[socket.fileno()],
        )
    document: dict[str, Any] = {
        "process": process.to_json(),
        "port": port,
        "store_url": store_url,
    }
    partial = _path(home).with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document))
    partial.replace(_path(home))


def _path(home: Home) -> Path:
    return home.prefect / "media.json"


def _has_pages(env: Mapping[str, str]) -> bool:
    text = user_settings(env).get("PREFECT_SERVER_UI_ENABLED", "true")
    return text.lower() not in ("false", "0", "no", "off")

"""The few requests to a Prefect server that are worth making without importing Prefect."""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from stages.errors import StageError

_BUSY = {429, 503}
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 4.0  # eight tries within 6 s


class ServerError(StageError, RuntimeError):
    """The Prefect server cannot be started or reached, or refuses what it is asked."""


class PrefectApi:
    """A Prefect server's HTTP interface, one connection per request.

    Args:
        url: Such as `http://127.0.0.1:4200/api`.
        env: Where `PREFECT_API_AUTH_STRING` (`user:password`) and `PREFECT_API_KEY` are looked
            up; by default this process's environment.
    """

    def __init__(self, url: str, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(
                f"PREFECT_API_URL is {url!r}; set it to an address such as "
                "http://127.0.0.1:4200/api"
            )
        self.url = url
        self._parts = parts
        self._headers = {"Content-Type": "application/json"}
        if auth := env.get("PREFECT_API_AUTH_STRING"):
            self._headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        elif key := env.get("PREFECT_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def is_healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether a server answers and is well; a few milliseconds on the same machine."""
        try:
            return bool(self._send("GET", "/health", None, timeout_s)[0] == 200)
        except (OSError, http.client.HTTPException):
            return False

    def is_there(self, timeout_s: float = 5.0) -> bool:
        """Whether anything answers, also one that wants another password."""
        try:
            self._send("GET", "/health", None, timeout_s)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def call(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        """The decoded answer; None for an empty one.

        A server on SQLite says 503 while another writer has the database: asked again.

        Raises:
            ServerError: No answer, or one that says no.
        """
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                status, data = self._send(method, path, body, timeout_s)
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(
                    f"the Prefect server at {self.url} does not answer: {error}; "
                    "see `exeunt status`"
                ) from error
            if status not in _BUSY or wait_s > _LONGEST_WAIT_S:
                break
            time.sleep(wait_s)
            wait_s *= 2
        if status >= 400:
            text = data.decode(errors="replace")[:500]
            raise ServerError(f"{method} {path} at {self.url} was refused with {status}: {text}")
        return json.loads(data) if data else None

    def _send(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        is_https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        with closing(connection):
            connection.request(method, self._parts.path.rstrip("/") + path, payload, self._headers)
            with connection.getresponse() as response:
                return response.status, response.read()


ZOMBIE_WINDOW_S = 90
"""Three heartbeats of 30 s; with fewer, one that is late would end a run that lives."""

ZOMBIE_AUTOMATION = "exeunt: crash runs without heartbeat"


def ensure_zombie_automation(api: PrefectApi) -> None:
    """Have the server call a run crashed that sends no heartbeat any more.

    A run whose process was killed, or whose worker was stopped, otherwise stays *Running* for
    ever: it cannot be retried and keeps its concurrency slot.

    Raises:
        ServerError: The server refuses it.
    """
    wanted = {"automations": {"name": {"any_": [ZOMBIE_AUTOMATION]}}}
    if api.call("POST", "/automations/filter", wanted):
        return
    api.call(
        "POST",
        "/automations/",
        {
            "name": ZOMBIE_AUTOMATION,
            "description": f"No sign of life for {ZOMBIE_WINDOW_S} s after a heartbeat.",
            "trigger": {
                "type": "event",
                "posture": "Proactive",
                "after": ["prefect.flow-run.heartbeat"],
                "expect": ["prefect.flow-run.*"],
                "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
                "for_each": ["prefect.resource.id"],
                "threshold": 1,
                "within": ZOMBIE_WINDOW_S,
            },
            "actions": [
                {
                    "type": "change-flow-run-state",
                    "state": "CRASHED",
                    "message": f"no heartbeat for {ZOMBIE_WINDOW_S} s",
                }
            ],
        },
    )

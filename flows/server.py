"""A Prefect server without asking the user for one: found, or started once and kept.

A run begins with `begin`, which returns at once, and calls `wait` when it needs the server:
meanwhile the fork server and Prefect itself can be imported. A server of the user's, named
by `PREFECT_API_URL` in the environment or in a Prefect profile, is used as it is. This module
loads no Prefect.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Literal

from flows.background import last_lines, start_in_background
from flows.port_owner import listens
from flows.ports import HOST, free_port
from flows.prefect_api import PrefectApi, ServerError, ensure_zombie_automation
from flows.prefect_profile import apply_profile, user_settings
from flows.server_state import ServerState, locked, log_path, read_state, write_state
from flows.settings import Home

__all__ = [
    "Mode",
    "Server",
    "Starting",
    "begin",
    "configured_url",
    "ensure_server",
    "read_state",
    "server_command",
    "server_environment",
    "stop_server",
]

logger = logging.getLogger(__name__)

FIRST_PORT, LAST_PORT = 4201, 4299  # 4200 is where a server of the user's would be
START_TIMEOUT_S = 120.0
"""The first start makes the database: 9 s on two idle cores, later ones 3 s."""
HUNG_S = 15.0
"""A server that was healthy once and is silent for this long is started again."""
_NUM_STARTS = 3
_POLL_S = 0.05

Mode = Literal["configured", "local", "ephemeral"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """The server that a run talks to.

    Attributes:
        mode: `configured` is the user's, `local` is ours in the background, `ephemeral` is
            one that Prefect starts inside of the run and that forgets most of its history.
        api_url: None for an ephemeral one.
        reason: Why it is ephemeral.
    """

    mode: Mode
    api_url: str | None
    reason: str = ""

    def enter(self, env: MutableMapping[str, str] | None = None) -> None:
        """Put the server's address where Prefect finds it when it is imported."""
        env = os.environ if env is None else env
        if self.api_url is not None:
            env["PREFECT_API_URL"] = self.api_url
        else:
            env["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "true"


def ensure_server(home: Home, env: Mapping[str, str] | None = None) -> Server:
    """The server to use, started if need be; blocks until it answers.

    Never raises for a server of ours that does not start: the answer is then `ephemeral`,
    with a warning that says why.

    Raises:
        ServerError: The user's own server does not answer.
    """
    return begin(home, env).wait()


def begin(home: Home, env: Mapping[str, str] | None = None) -> Starting:
    """Start the local server unless it runs or the user has one, and do not wait for it.

    Returns within about 50 ms; half a second later when another program has taken the server's
    port. Of several processes that call this at a time, one starts it.
    """
    env = dict(os.environ if env is None else env)
    if (url := configured_url(home, env)) is not None:
        return Starting(home, env, configured=url)
    starting = Starting(home, env)
    starting.start()
    return starting


def configured_url(home: Home, env: Mapping[str, str]) -> str | None:
    """The address of the server that the user has named; None if that is ours, or there is none."""
    url = user_settings(env).get("PREFECT_API_URL")
    state = read_state(home)
    return None if state is not None and url == state.api_url else url


class Starting:
    """A server on its way up."""

    def __init__(self, home: Home, env: dict[str, str], configured: str | None = None) -> None:
        self._home, self._env, self._configured = home, env, configured
        self._failure = ""

    def start(self) -> None:
        """Start the process if none runs; what goes wrong is kept for `wait`."""
        try:
            _start(self._home, self._env)
        except OSError as error:
            self._failure = str(error)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> Server:
        """The server, once it answers.

        Args:
            timeout_s: How long a start may take; after that, or after three starts that
                failed, the answer is an ephemeral server and why.

        Raises:
            ServerError: The user's own server does not answer.
        """
        if self._configured is not None:
            return self._configured_server(self._configured)
        deadline = time.monotonic() + timeout_s
        for _ in range(_NUM_STARTS):
            if self._failure:
                break
            state = self._wait_for_process(deadline)
            if state is not None:
                return Server(mode="local", api_url=state.api_url)
            if time.monotonic() >= deadline:
                self._failure = f"it did not answer within {timeout_s:g} s"
            else:
                self.start()
        self._failure = self._failure or f"it ended {_NUM_STARTS} times while starting"
        log = log_path(self._home)
        reason = (
            f"the local Prefect server could not be used: {self._failure}; see {log}; "
            "this run's history is kept by the run alone and mostly lost with it"
        )
        logger.warning("%s\n%s", reason, last_lines(log))
        return Server(mode="ephemeral", api_url=None, reason=reason)

    def _configured_server(self, url: str) -> Server:
        if not PrefectApi(url, self._env).is_there():
            raise ServerError(
                f"no Prefect server answers at {url}, which PREFECT_API_URL or your Prefect "
                "profile names; start it, or unset PREFECT_API_URL to have a local one started"
            )
        return Server(mode="configured", api_url=url)

    def _wait_for_process(self, deadline: float) -> ServerState | None:
        """The state once it is healthy; None when its process ended, hangs, or time is up."""
        began = time.monotonic()
        while time.monotonic() < deadline:
            state = read_state(self._home)  # another process may have started it anew
            if state is None or not state.process.is_alive():
                return None
            is_healthy = PrefectApi(state.api_url, self._env).is_healthy()
            # Another home's server may have taken the port after we looked: then it answers
            # here until ours, which cannot have it, ends.
            if is_healthy and listens(state.process.pid, state.port):
                if not state.was_healthy:
                    self._first_answer(state)
                return state
            if not is_healthy and state.was_healthy and time.monotonic() - began > HUNG_S:
                logger.warning("the Prefect server at %s hangs; starting it anew", state.api_url)
                state.process.stop()
                return None
            time.sleep(_POLL_S)
        return None

    def _first_answer(self, state: ServerState) -> None:
        try:
            ensure_zombie_automation(PrefectApi(state.api_url, self._env))
        except ServerError as error:
            logger.warning("runs that die unseen will be shown as running: %s", error)
        with locked(self._home):
            if read_state(self._home) == state:
                write_state(self._home, replace(state, was_healthy=True))


def server_environment(home: Home, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the local server and of what belongs to it."""
    own = dict(env)
    apply_profile(home, own)
    url = f"http://{HOST}:{port}"
    own |= {
        "PREFECT_HOME": str(home.prefect),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        # Runs that die without a word are found by the triggers service alone.
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "true",
    }
    # By default any web page in the user's browser may call the API, which starts programs.
    own.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", f"{url},http://localhost:{port}")
    return own


def server_command(port: int) -> list[str]:
    """What starts a server on the loopback interface."""
    command = [sys.executable, "-m", "prefect", "server", "start"]
    return [*command, "--host", HOST, "--port", str(port)]


def stop_server(home: Home) -> bool:
    """Stop the local server; whether there was one."""
    if not home.prefect.is_dir():
        return False
    with locked(home):
        state = read_state(home)
        if state is None or not state.process.is_alive():
            return False
        write_state(home, replace(state, was_stopped=True))  # before it ends: runs look at this
        state.process.stop()
        return True


def _start(home: Home, env: Mapping[str, str]) -> None:
    home.prefect.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(home):
        state = read_state(home)
        version = importlib.metadata.version("prefect")
        if state is not None and state.process.is_alive():
            if _as_numbers(state.version) >= _as_numbers(version):
                return
            logger.info("Prefect is %s now, its server runs %s: restarting", version, state.version)
            state.process.stop()
        port = free_port(FIRST_PORT, LAST_PORT, None if state is None else state.port)
        process = start_in_background(
            server_command(port),
            env=server_environment(home, port, env),
            folder=home.prefect,
            log=log_path(home),
        )
        write_state(
            home, ServerState(process=process, port=port, version=version, started_s=time.time())
        )


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

"""`exeunt up`, `down`, `status` and `prune`: the local server, its worker and its history."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flows.background import BackgroundProcess, last_lines, start_in_background
from flows.media_service import begin_media, read_media_state, stop_media
from flows.prefect_api import PrefectApi, ServerError, ensure_zombie_automation
from flows.prefect_profile import apply_profile
from flows.server import configured_url, ensure_server, server_environment, stop_server
from flows.server_state import log_path, read_state
from flows.settings import Home, RunSettings
from stages.errors import RequestError

POOL = "exeunt"
WORKER_TIMEOUT_S = 120.0
_STOP_GRACE_S = 15.0  # a worker passes SIGTERM on to its runs and waits for them
_BATCH = 50  # the most that the server deletes in one call


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What runs.

    Attributes:
        api_url: The server's address; None when none was ever started.
        mode: `configured` is the user's own server, `local` ours, `none` neither.
        is_healthy: Whether it answers.
        server_pid: Process id of a local server that runs.
        server_version: Of the Prefect that a local server runs.
        worker_pid: Process id of a worker of ours that runs.
        media_url: Where the store's pictures are served for Prefect's pages.
        database_nbytes: Size of a local server's database.
        logs: Where to look when something is wrong.
    """

    api_url: str | None
    mode: str
    is_healthy: bool
    server_pid: int | None
    server_version: str | None
    worker_pid: int | None
    media_url: str | None
    database_nbytes: int | None
    logs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def up(
    home: Home,
    *,
    worker: bool = True,
    deploy: bool = True,
    env: Mapping[str, str] | None = None,
) -> Status:
    """Start what is not there yet: server, automation, pool and deployments, worker.

    Loads Prefect for the deployments. Blocks until the worker has reported to the server.

    Raises:
        ServerError: The server or the worker did not start.
    """
    env = os.environ if env is None else env
    server = ensure_server(home, env)
    if server.api_url is None:
        raise ServerError(server.reason)
    api = PrefectApi(server.api_url, env)
    ensure_zombie_automation(api)
    begin_media(home, RunSettings.from_env(env).store_url, env)
    if deploy:
        own = os.environ if env is os.environ else dict(env)
        apply_profile(home, own)  # before Prefect is imported
        server.enter(own)
        import flows.deploy

        flows.deploy.deploy_shipped(server.api_url, home)
    if worker:
        start_worker(home, api, env)
    return status(home, env)


def down(home: Home) -> list[str]:
    """Stop worker, server of pictures and local server; what was stopped, by name.

    Runs of the worker end too, and count as crashed a little after the server's next start.
    A server of the user's is left alone.
    """
    stopped = []
    process = _read_worker(home)
    if process is not None and process.is_alive():
        process.stop(_STOP_GRACE_S)
        stopped.append("worker")
    _worker_path(home).unlink(missing_ok=True)
    if stop_media(home):
        stopped.append("pictures")
    if stop_server(home):
        stopped.append("server")
    return stopped


def status(home: Home, env: Mapping[str, str] | None = None) -> Status:
    """What runs now; starts nothing and takes milliseconds."""
    env = os.environ if env is None else env
    state = read_state(home)
    url = configured_url(home, env)
    mode = "configured"
    if url is None:
        mode = "none" if state is None else "local"
        url = None if state is None else state.api_url
    is_local = state is not None and mode == "local"
    runs = is_local and state is not None and state.process.is_alive()
    worker = _read_worker(home)
    media = read_media_state(home)
    database = home.prefect / "prefect.db"
    return Status(
        api_url=url,
        mode=mode,
        is_healthy=url is not None and PrefectApi(url, env).is_healthy(),
        server_pid=state.process.pid if runs and state is not None else None,
        server_version=state.version if runs and state is not None else None,
        worker_pid=worker.pid if worker is not None and worker.is_alive() else None,
        media_url=media.url if media is not None and media.process.is_alive() else None,
        database_nbytes=database.stat().st_size if is_local and database.exists() else None,
        logs=tuple(str(p) for p in (log_path(home), worker_log_path(home)) if p.exists()),
    )


def prune(home: Home, older_than: timedelta, *, env: Mapping[str, str] | None = None) -> int:
    """Delete flow runs that ended that long ago, with their task runs, states and logs.

    Results are not touched: they are the artifact store's. The space becomes free inside of
    the database's file.

    Returns:
        How many flow runs went.

    Raises:
        ServerError: The server does not answer or refuses.
        RequestError: `older_than` is negative.
    """
    if older_than < timedelta():
        days = older_than / timedelta(days=1)
        raise RequestError(f"runs older than {days:g} days cannot be deleted; give 0 or more")
    server = ensure_server(home, env)
    if server.api_url is None:
        raise ServerError(server.reason)
    api = PrefectApi(server.api_url, env)
    ended = {
        "end_time": {"before_": (datetime.now(UTC) - older_than).isoformat()},
        "state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}},
    }
    num_deleted = 0
    while True:
        answer = api.call("POST", "/flow_runs/bulk_delete", {"flow_runs": ended, "limit": _BATCH})
        if not answer["deleted"]:
            return num_deleted
        num_deleted += len(answer["deleted"])


# ---- the worker ----------------------------------------------------------------------------


def start_worker(home: Home, api: PrefectApi, env: Mapping[str, str] | None = None) -> None:
    """Start a worker of this machine for the pool, unless ours runs; wait for its report.

    Raises:
        ServerError: It ended, or did not report in time.
    """
    env = os.environ if env is None else env
    process = _read_worker(home)
    name = worker_name()
    log = worker_log_path(home)
    if process is None or not process.is_alive():
        state = read_state(home)
        is_local = state is not None and state.api_url == api.url
        own = server_environment(home, state.port, env) if is_local and state else dict(env)
        own["PREFECT_API_URL"] = api.url
        apply_profile(home, own)
        own["EXEUNT_HOME"] = str(home.root)
        home.prefect.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
        try:
            process = start_in_background(
                [*command, "--pool", POOL, "--name", name], env=own, folder=home.prefect, log=log
            )
        except OSError as error:
            raise ServerError(f"the worker was not started: {error}") from error
        path = _worker_path(home)
        path.write_text(json.dumps(process.to_json()))
    deadline = time.monotonic() + WORKER_TIMEOUT_S
    wanted = {"workers": {"status": {"any_": ["ONLINE"]}}}
    while time.monotonic() < deadline and process.is_alive():
        if _pool_exists(api):
            online = api.call("POST", f"/work_pools/{POOL}/workers/filter", wanted)
            if name in [each["name"] for each in online]:
                return
        time.sleep(0.1)
    why = "did not report in time" if process.is_alive() else "ended"
    raise ServerError(f"the worker {why}; the end of {log}:\n{last_lines(log)}")


def worker_name() -> str:
    """One name per machine: a worker that is started again is the same worker."""
    return f"exeunt-{socket.gethostname()}"


def worker_log_path(home: Home) -> Path:
    return home.prefect / "worker.log"


def _worker_path(home: Home) -> Path:
    return home.prefect / "worker.json"


def _read_worker(home: Home) -> BackgroundProcess | None:
    try:
        return BackgroundProcess.from_json(json.loads(_worker_path(home).read_text()))
    except (OSError, ValueError):
        return None


def _pool_exists(api: PrefectApi) -> bool:
    wanted = {"work_pools": {"name": {"any_": [POOL]}}}
    return bool(api.call("POST", "/work_pools/filter", wanted))

"""`up` starts what is needed, a worker runs a deployment, and `down` leaves no process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows import deploy, services
from flows.prefect_api import PrefectApi
from flows.server_state import state_path
from flows.services import down, prune, status, up
from flows.settings import Home
from stages.errors import RequestError
from tests.conftest import _template

REPOSITORY = Path(__file__).parents[2]


def environment(home: Home) -> dict[str, str]:
    kept = ("PATH", "HOME", "DO_NOT_TRACK", "PREFECT_SERVER_UI_ENABLED")
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return own | {
        "EXEUNT_HOME": str(home.root),
        "PYTHONPATH": str(REPOSITORY),
        "PREFECT_WORKER_QUERY_SECONDS": "0.2",
    }


def processes_of(home: Home) -> list[str]:
    """Commands of all processes that have this home in their environment."""
    needle = f"EXEUNT_HOME={home.root}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def listening(*pids: int | None) -> set[str]:
    """The addresses on which processes listen, of both versions of IP."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                sockets.add(str(fd.readlink()))
    found = set()
    for name, version in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
                found.add(socket.inet_ntop(version, address))
    return found


@pytest.fixture
def studio(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Home, dict[str, str]]]:
    """A home with a migrated database, and its environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deploy, "FLOWS", ("tests.flows.stub_flow:stub",))
    home = Home(root=tmp_path / "home")
    home.prefect.mkdir(parents=True)
    # `prefect_server` has made this one: a database takes seconds to migrate.
    (home.prefect / "prefect.db").write_bytes(_template().read_bytes())
    yield home, environment(home)
    down(home)


def wait_for_state(api: PrefectApi, run_id: str, wanted: set[str]) -> dict[str, Any]:
    while True:  # the test's own timeout ends this
        run: dict[str, Any] = api.call("GET", f"/flow_runs/{run_id}")
        if run["state_type"] in wanted:
            return run
        time.sleep(0.1)


def test_a_deployment_runs_between_up_and_down(studio: tuple[Home, dict[str, str]]) -> None:
    home, env = studio
    assert status(home, env).mode == "none"
    found = up(home, env=env)
    assert found == status(home, env)
    assert found.mode == "local"
    assert found.is_healthy
    assert found.server_pid and found.worker_pid
    assert len(processes_of(home)) == 2
    assert listening(found.server_pid, found.worker_pid) == {"127.0.0.1"}
    assert up(home, env=env) == found, "a second `up` starts nothing"

    api = PrefectApi(str(found.api_url))
    deployment = api.call("GET", "/deployments/name/stub/on-demand")
    output = home.root / "ran"
    run = api.call(
        "POST",
        f"/deployments/{deployment['id']}/create_flow_run",
        {"parameters": {"prompt": "fox", "output": str(output)}},
    )
    ended = wait_for_state(api, run["id"], {"COMPLETED", "FAILED", "CRASHED"})
    assert ended["state_type"] == "COMPLETED", ended["state"]
    assert output.read_text() == f"fox {home.root}"

    assert prune(home, timedelta(days=1), env=env) == 0
    assert prune(home, timedelta(), env=env) == 1
    assert api.call("POST", "/flow_runs/count", {}) == 0

    assert down(home) == ["worker", "server"]
    assert processes_of(home) == []
    after = status(home, env)
    assert (after.is_healthy, after.server_pid, after.worker_pid) == (False, None, None)
    assert down(home) == []


def test_pruning_takes_more_than_one_batch_and_leaves_runs_that_go_on(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @flow(name="pruned", persist_result=False)
    def short() -> None:
        pass

    api = PrefectApi(prefect_server)
    for _ in range(3):
        short()
    flow_id = api.call("GET", "/flows/name/pruned")["id"]
    going_on = api.call("POST", "/flow_runs/", {"flow_id": flow_id})
    monkeypatch.setattr(services, "_BATCH", 2)
    env = {"PREFECT_API_URL": prefect_server}
    assert prune(Home(root=tmp_path), timedelta(hours=1), env=env) == 0
    assert prune(Home(root=tmp_path), timedelta(), env=env) >= 3
    of_flow = {"flows": {"id": {"any_": [flow_id]}}}
    assert [run["id"] for run in api.call("POST", "/flow_runs/filter", of_flow)] == [going_on["id"]]


def test_a_negative_age_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="older than -1 days cannot be deleted"):
        prune(Home(root=tmp_path), timedelta(days=-1), env={})


def test_looking_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(root=tmp_path / "home")
    found = status(home, {"HOME": str(tmp_path)})
    assert (found.mode, found.api_url, found.is_healthy) == ("none", None, False)
    assert not home.root.exists()
    assert down(home) == []
    assert not state_path(home).exists()


def test_a_users_server_is_shown_and_left_alone(prefect_server: str, tmp_path: Path) -> None:
    home = Home(root=tmp_path)
    found = status(home, {"PREFECT_API_URL": prefect_server})
    assert (found.mode, found.api_url, found.is_healthy) == ("configured", prefect_server, True)
    assert down(home) == []
    assert PrefectApi(prefect_server).is_healthy()

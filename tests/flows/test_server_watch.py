"""A local server that ends in the middle of a run is started again, at its port."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from flows import cli_family, server_watch
from flows.prefect_api import PrefectApi
from flows.server import ensure_server, stop_server
from flows.server_state import read_state
from flows.server_watch import ServerWatch
from flows.settings import Home
from tests.flows.test_server import CLEAN, fake_home, local_pid  # noqa: F401 - a fixture


def eventually(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(home: Home, after_pid: int) -> bool:
    state = read_state(home)
    return (
        state is not None
        and state.process.pid != after_pid
        and PrefectApi(state.api_url, CLEAN).is_healthy()
    )


def test_a_killed_server_is_back_at_its_port(
    fake_home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_watch, "LOOK_EVERY_S", 0.01)
    url = ensure_server(fake_home, CLEAN).api_url
    pid = local_pid(fake_home)
    with ServerWatch(fake_home, CLEAN) as watch:
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: answers(fake_home, pid))
        state = read_state(fake_home)
        assert state is not None
        assert state.api_url == url
        assert watch.num_starts == 1
    assert f"the Prefect server at {url} has ended; starting it anew" in caplog.text


def test_a_server_that_the_user_stops_stays_down(
    fake_home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_watch, "LOOK_EVERY_S", 0.01)
    ensure_server(fake_home, CLEAN)
    with ServerWatch(fake_home, CLEAN) as watch:
        assert stop_server(fake_home)
        time.sleep(0.2)
        assert watch.num_starts == 0
    ensure_server(fake_home, CLEAN)  # a new run is a new wish
    assert local_pid(fake_home)


def test_a_server_that_keeps_ending_is_left_alone(
    fake_home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_watch, "LOOK_EVERY_S", 0.01)
    ensure_server(fake_home, CLEAN)
    started: list[Any] = []
    monkeypatch.setattr(server_watch, "begin", lambda *given: started.append(given))
    os.kill(local_pid(fake_home), signal.SIGKILL)
    with ServerWatch(fake_home, CLEAN) as watch:
        eventually(lambda: len(started) == server_watch.MAX_STARTS)
        time.sleep(0.1)
    assert len(started) == watch.num_starts == server_watch.MAX_STARTS


def test_a_run_that_met_no_server_begins_again_when_it_is_back(
    fake_home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)  # of the test session's own server
    from prefect.client.orchestration import SyncPrefectClient

    given: list[int] = []

    def flow(seed: int) -> str:
        given.append(seed)
        if len(given) == 1:
            with SyncPrefectClient("http://127.0.0.1:9/api") as client:  # nobody is there
                client.raise_for_api_version_mismatch()  # as each run does when it begins
        return "painted"

    assert cli_family.call_flow(flow, {"seed": 7}, fake_home) == "painted"
    assert given == [7, 7]
    assert local_pid(fake_home)
    assert "the run begins again when it answers" in caplog.text


def test_other_errors_of_a_run_are_not_tried_again(
    fake_home: Home,  # noqa: F811
) -> None:
    given: list[int] = []

    def flow(seed: int) -> str:
        given.append(seed)
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        cli_family.call_flow(flow, {"seed": 7}, fake_home)
    assert given == [7]

"""Progress reaches the server at most once an interval, and never makes a stage wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from flows.progress import ProgressPoster, progress_shown, report_progress


class Server:
    """Takes updates; answers each only when it is let."""

    def __init__(self) -> None:
        self.got: list[tuple[float, str]] = []
        self.arrived = threading.Semaphore(0)
        self.answer = threading.Semaphore(0)

    def send(self, percent: float, message: str) -> None:
        self.got.append((percent, message))
        self.arrived.release()
        assert self.answer.acquire(timeout=30)


def poster(server: Server, **options: Any) -> ProgressPoster:
    options = {"interval_s": 0.0, "slow_s": 60.0} | options
    return ProgressPoster("denoise", send=server.send, **options)


def test_the_newest_of_many_updates_is_sent_while_the_server_is_busy() -> None:
    server = Server()
    progress = poster(server)
    progress.post(0.0, "loading")
    assert server.arrived.acquire(timeout=30)
    for percent in range(1, 100):
        progress.post(float(percent), "running")  # returns although nobody answers
    server.answer.release()
    assert server.arrived.acquire(timeout=30)
    server.answer.release()
    progress.close()
    assert server.got == [(0.0, "loading"), (99.0, "running")]


def test_nothing_is_sent_before_the_first_interval_is_over() -> None:
    server = Server()
    progress = poster(server, interval_s=3600.0)
    progress.post(50.0, "running")
    progress.close()
    assert server.got == []


def test_a_slow_server_gets_no_more_updates() -> None:
    server = Server()
    progress = poster(server, slow_s=-1.0)  # whatever it takes is too long
    progress.post(1.0, "")
    assert server.arrived.acquire(timeout=30)
    server.answer.release()
    (thread,) = [each for each in threading.enumerate() if each.name == "progress"]
    thread.join(30)
    progress.post(2.0, "")
    progress.close()
    assert server.got == [(1.0, "")]


def test_a_server_that_refuses_does_not_harm_the_stage() -> None:
    refused = threading.Event()

    def refuse(percent: float, message: str) -> None:
        refused.set()
        raise ConnectionError("no server")

    progress = ProgressPoster("denoise", send=refuse, interval_s=0.0, slow_s=60.0)
    progress.post(1.0, "")
    assert refused.wait(30)
    progress.post(2.0, "")
    progress.close()


def test_closing_does_not_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.progress._JOIN_S", 0.01)
    server = Server()
    progress = poster(server)
    progress.post(1.0, "")
    assert server.arrived.acquire(timeout=30)
    progress.close()
    server.answer.release()


def test_outside_of_a_stage_nothing_happens() -> None:
    report_progress(1, 2, "running")


def test_a_run_gets_one_artifact_that_moves(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.progress.INTERVAL_S", 0.0)
    monkeypatch.setattr("flows.progress.SLOW_S", 60.0)

    @flow(persist_result=False)
    def shown() -> None:
        with progress_shown("denoise Red Fox!"):
            for step in range(3):
                report_progress(step, 2, "running")
                time.sleep(0.05)

    shown()
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter.model_validate({"key": {"any_": ["progress-denoise-red-fox"]}})
        deadline = time.monotonic() + 30
        while not (found := client.read_artifacts(artifact_filter=wanted)):
            assert time.monotonic() < deadline
    assert len(found) == 1
    assert found[0].type == "progress"
    assert found[0].flow_run_id is not None

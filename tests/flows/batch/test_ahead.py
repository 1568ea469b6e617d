"""Requests that wait in a stage process's pipe: answered in order, lost with the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from flows.batch.ahead import AheadSession
from flows.launch import Launcher
from stages.errors import RequestError, StageCrashed
from tests.flows.conftest import launcher
from tests.support.fake_stages import request
from tests.support.stage_processes import CONTEXT, Watcher

__all__ = ["launcher"]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def session(launcher: Launcher, watcher: Watcher) -> Iterator[AheadSession]:
    with AheadSession("encode", launcher, on_event=watcher) as made:
        yield made


def test_what_was_sent_ahead_is_done_before_it_is_asked_for(session: AheadSession) -> None:
    first, second = request("echo", "first"), request("echo", "second")
    session.send_ahead(first, CONTEXT)
    session.send_ahead(second, CONTEXT)
    assert session.has_ahead(first) and session.has_ahead(second)
    _, report = session.run(first, CONTEXT)
    _, after = session.run(second, CONTEXT)
    assert [report["answer"], after["answer"]] == ["first", "second"]
    assert report["pid"] == after["pid"]
    assert not session.has_ahead(second)


def test_another_request_goes_behind_and_the_early_answer_is_kept(
    session: AheadSession, watcher: Watcher
) -> None:
    early, other = request("events", 3), request("echo", "other")
    session.send_ahead(early, CONTEXT)
    assert session.run(other, CONTEXT)[1]["answer"] == "other"
    told = [event.kind for event in watcher.events]
    assert "progress" not in told, "steps of a row that is not at work"
    assert session.has_ahead(early)
    assert session.run(early, CONTEXT)[1]["answer"] is None


def test_an_error_sent_ahead_is_its_own_requests_alone(session: AheadSession) -> None:
    bad, good = request("raise", "RequestError"), request("echo", 1)
    session.send_ahead(bad, CONTEXT)
    session.send_ahead(good, CONTEXT)
    with pytest.raises(RequestError, match="height 30"):
        session.run(bad, CONTEXT)
    assert session.run(good, CONTEXT)[1]["answer"] == 1


def test_a_process_that_dies_takes_what_waits_along_and_it_is_sent_again(
    session: AheadSession,
) -> None:
    deadly, after = request("signal", int(signal.SIGKILL)), request("echo", "after")
    session.send_ahead(deadly, CONTEXT)
    session.send_ahead(after, CONTEXT)
    assert session._process is not None and session._process.wait(10)
    with pytest.raises(StageCrashed):  # however long ago it died
        session.run(deadly, CONTEXT)
    assert not session.has_ahead(after)
    assert session.run(after, CONTEXT)[1]["answer"] == "after"


def test_a_session_at_rest_has_nothing_ahead(session: AheadSession) -> None:
    session.send_ahead(request("echo", 1), CONTEXT)
    session.rest()
    assert not session.has_ahead(request("echo", 1))
    assert session.run(request("echo", 2), CONTEXT)[1]["answer"] == 2

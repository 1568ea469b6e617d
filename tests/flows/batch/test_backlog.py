"""A batch waits for a server that is too far behind, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flows.batch import backlog
from flows.batch.backlog import LOOK_EVERY, Backlog


class Server:
    """Records some of the task runs at each look."""

    def __init__(self, recorded: Iterator[int | None]) -> None:
        self._recorded, self.num_looks = recorded, 0

    def count(self) -> int | None:
        self.num_looks += 1
        return next(self._recorded)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the batch would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(backlog.time, "sleep", slept.append)
    return slept


def _send(behind: Backlog, num: int) -> None:
    for _ in range(num):
        behind.sends_task_run()


def test_a_server_that_keeps_up_is_looked_at_now_and_then(waits: list[float]) -> None:
    server = Server(iter(range(LOOK_EVERY * 2, 10**6, LOOK_EVERY)))
    _send(Backlog(server.count, most_behind=LOOK_EVERY * 2), LOOK_EVERY * 6)
    assert server.num_looks == 4  # the first two looks could not find it too far behind
    assert waits == []


def test_a_batch_waits_until_the_server_has_caught_up(waits: list[float]) -> None:
    server = Server(iter([0, 10, 150, 300]))
    _send(Backlog(server.count, most_behind=100), LOOK_EVERY * 2)
    # Of 200 it had 0, 10 and then enough; of 400 it had 300, enough at once.
    assert (server.num_looks, len(waits)) == (4, 2)


def test_a_server_that_does_not_answer_or_gets_stuck_stops_no_batch(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _send(Backlog(Server(iter([None])).count, most_behind=100), LOOK_EVERY)
    assert waits == []
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(backlog.time, "monotonic", lambda: next(clock))
    _send(Backlog(lambda: 7, most_behind=100), LOOK_EVERY)
    assert 0 < len(waits) < 10
    assert "recorded 7 of 200 task runs and gets no further" in caplog.text

"""A server that is lost between chunks is waited for; one lost within a chunk ends the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flows.batch import chunks
from flows.prefect_api import ServerError


class Server:
    """Stands for Prefect: loses so many calls before a chunk, in it or after it."""

    def __init__(self, before: int = 0, *, within: bool = False, after: bool = False) -> None:
        self.before, self.within, self.after = before, within, after

    def __call__(self, number: int, num_rows: int) -> None:
        self.before -= 1
        if self.before >= 0:
            raise RuntimeError("Failed to reach API") from httpx.ConnectError("refused")
        chunks._work.get()()
        if self.after:
            raise httpx.ReadError("closed")


class Passes:
    def __init__(self, error: Exception | None = None) -> None:
        self.chunks: list[Any] = []
        self._error = error

    def run_chunk(self, rows: Any) -> None:
        if self._error is not None:
            raise self._error
        self.chunks.append(rows)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def run(server: Server, error: Exception | None = None) -> list[Any]:
        passes: Any = Passes(error)
        monkeypatch.setattr(chunks, "batch_chunk", server)
        monkeypatch.setattr(chunks.time, "sleep", lambda seconds: None)
        chunks.run_in_sub_flow(1, ["row"], passes, [])  # type: ignore[list-item]
        return passes.chunks

    return run


@pytest.mark.parametrize("server", [Server(before=3), Server(after=True)])
def test_a_chunk_runs_once_when_the_server_is_back(
    run: Callable[..., list[Any]], server: Server
) -> None:
    assert run(server) == [["row"]]


def test_a_server_that_does_not_come_back_ends_the_batch(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PATIENCE_S", 0.0)
    with pytest.raises(ServerError, match="start the batch again"):
        run(Server(before=10**9))


def test_a_chunk_that_lost_the_server_is_not_begun_twice(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(ServerError):
        run(Server(), httpx.ConnectError("refused"))
    with pytest.raises(KeyError):
        run(Server(), KeyError("another error"))

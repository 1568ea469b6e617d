"""The server of pictures comes with the local Prefect server, and goes with it."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.background import BackgroundProcess
from flows.media_service import begin_media, media_url, read_media_state, stop_media
from flows.ports import listener
from flows.server_state import ServerState, write_state
from flows.services import down, status
from flows.settings import Home
from stages.artifacts import ArtifactStore

PNG = b"\x89PNG\r\n\x1a\n and no more"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home whose Prefect server seems to be this very process."""
    home = Home(root=tmp_path / "home")
    home.prefect.mkdir(parents=True)
    monkeypatch.chdir(home.prefect)
    process = BackgroundProcess.of(os.getpid())
    assert process is not None
    write_state(home, ServerState(process=process, port=4299, version="3", started_s=0.0))
    yield home
    stop_media(home)


def environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"PREFECT_SERVER_UI_ENABLED": "true"}


def get(url: str, path: str) -> tuple[int, bytes]:
    """Its socket is there before it runs: what is asked at once is answered then."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_serves_the_store_until_it_is_stopped(own: Home, tmp_path: Path) -> None:
    stores = [f"file://{tmp_path / name}" for name in ("a", "b")]
    digest = ArtifactStore(stores[0]).put(PNG, "image/png").digest
    begin_media(own, stores[0], environment())
    url = media_url(own, stores[0])
    assert url is not None and url.startswith("http://127.0.0.1:43")
    assert get(url, f"/media/{digest}") == (200, PNG)
    assert status(own, environment()).media_url == url
    first = read_media_state(own)
    begin_media(own, stores[0], environment())
    assert read_media_state(own) == first, "one that runs is left alone"

    begin_media(own, stores[1], environment())
    second = read_media_state(own)
    assert second is not None and first is not None and not first.process.is_alive()
    assert (second.port, media_url(own, stores[0])) == (first.port, None)
    assert get(second.url, f"/media/{digest}")[0] == 404

    assert stop_media(own) and not stop_media(own)
    assert media_url(own, stores[1]) is None and not second.process.is_alive()


def test_it_ends_with_a_home_that_goes_away(own: Home, tmp_path: Path) -> None:
    begin_media(own, f"file://{tmp_path / 'a'}", environment())
    state = read_media_state(own)
    assert state is not None
    get(state.url, "/")
    own.prefect.rename(tmp_path / "elsewhere")
    while state.process.is_alive():
        time.sleep(0.1)


def test_down_stops_it(own: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_media(own, f"file://{tmp_path / 'a'}", environment())
    state = read_media_state(own)
    assert state is not None and state.process.is_alive()
    (own.prefect / "server.json").unlink()  # this process is no server to be stopped
    assert down(own) == ["pictures"] and not state.process.is_alive()


@pytest.mark.parametrize("has_server", [True, False])
def test_nothing_is_started_where_no_page_would_show_it(own: Home, has_server: bool) -> None:
    env = environment() | {"PREFECT_SERVER_UI_ENABLED": "false"}
    if not has_server:
        (own.prefect / "server.json").unlink()
        env = environment()
    begin_media(own, "file:///a", env)
    assert read_media_state(own) is None


def test_two_that_want_one_port_get_two() -> None:
    """Each home of a machine has a server of its own, and they may start at one moment."""
    with listener(4301, 4399) as first:
        taken = first.getsockname()[1]
        with listener(4301, 4399, taken) as second:
            assert second.getsockname()[1] != taken

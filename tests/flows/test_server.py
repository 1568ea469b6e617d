"""One local server per home, found again, started anew when it is gone, and replaced by why."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows import server
from flows.background import BackgroundProcess, start_in_background
from flows.port_owner import listens
from flows.prefect_api import PrefectApi, ServerError
from flows.server import Server, begin, ensure_server, stop_server
from flows.server_state import read_state, state_path
from flows.settings import Home

FAKE = str(Path(__file__).with_name("fake_server.py"))
CLEAN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}


@pytest.fixture
def fake_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home whose server is the fake one; the test's end stops it."""
    monkeypatch.chdir(tmp_path)
    # Ports that no other server of this machine, nor another test session, would pick.
    first = 20_000 + os.getpid() % 250 * 40
    monkeypatch.setattr(server, "FIRST_PORT", first)
    monkeypatch.setattr(server, "LAST_PORT", first + 39)
    monkeypatch.setattr(server, "server_command", lambda port: [sys.executable, FAKE, str(port)])
    home = Home(root=tmp_path / "home")
    yield home
    stop_server(home)


def local_pid(home: Home) -> int:
    state = read_state(home)
    assert state is not None
    assert state.process.is_alive()
    return state.process.pid


# ---- one server ----------------------------------------------------------------------------


def test_a_second_call_finds_the_first_ones_server(fake_home: Home) -> None:
    first = ensure_server(fake_home, CLEAN)
    pid = local_pid(fake_home)
    assert first.mode == "local"
    assert re.fullmatch(r"http://127\.0\.0\.1:2\d{4}/api", str(first.api_url))
    assert ensure_server(fake_home, CLEAN) == first
    assert local_pid(fake_home) == pid


ENSURE = f"""
import sys
from pathlib import Path
from flows import server
from flows.settings import Home
server.server_command = lambda port: [sys.executable, {FAKE!r}, str(port)]
home = Home(root=Path(sys.argv[1]))
print(server.ensure_server(home).api_url, server.read_state(home).process.pid)
"""


def test_processes_that_start_together_start_one_server(fake_home: Home) -> None:
    def ensure(_: int) -> str:
        run = subprocess.run(
            [sys.executable, "-c", ENSURE, str(fake_home.root)],
            env=CLEAN,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ensure, range(4)))
    assert len(set(answers)) == 1, answers
    commands = [_command(entry) for entry in Path("/proc").glob("[0-9]*")]
    port = read_state(fake_home).port  # type: ignore[union-attr]
    assert sum(FAKE in command and str(port) in command for command in commands) == 1


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_beginning_does_not_wait_for_the_server(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = "import time; time.sleep(600)"
    monkeypatch.setattr(server, "server_command", lambda port: [sys.executable, "-c", never])
    starting = begin(fake_home, CLEAN)
    assert local_pid(fake_home)
    assert starting.wait(timeout_s=0.2).mode == "ephemeral"


def test_the_first_answer_of_a_server_sets_up_the_zombie_automation(fake_home: Home) -> None:
    url = str(ensure_server(fake_home, CLEAN).api_url)
    ensure_server(fake_home, CLEAN)
    (automation,) = PrefectApi(url).call("POST", "/automations/filter", {})
    assert automation["trigger"]["within"] == 90
    assert automation["actions"][0]["state"] == "CRASHED"


# ---- a server that is gone -----------------------------------------------------------------


def test_a_killed_server_is_started_again_at_its_port(fake_home: Home) -> None:
    first = ensure_server(fake_home, CLEAN)
    os.kill(pid := local_pid(fake_home), signal.SIGKILL)
    assert ensure_server(fake_home, CLEAN) == first
    assert local_pid(fake_home) != pid


def test_a_port_that_somebody_took_meanwhile_is_left_to_them(fake_home: Home) -> None:
    ensure_server(fake_home, CLEAN)
    state = read_state(fake_home)
    assert state is not None
    stop_server(fake_home)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", state.port))
        thief.listen()
        moved = ensure_server(fake_home, CLEAN)
    assert moved.mode == "local"
    assert moved.api_url != state.api_url


def test_another_homes_server_that_took_the_port_at_the_same_moment_is_not_ours(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two homes may look for a port at once, and find the same one free."""
    others: list[subprocess.Popen[bytes]] = []

    def start_late(command: list[str], **options: Any) -> BackgroundProcess:
        if not others:
            others.append(subprocess.Popen(command))
            api = PrefectApi(f"http://127.0.0.1:{command[-1]}/api", CLEAN)
            while not api.is_healthy():
                time.sleep(0.02)
        return start_in_background(command, **options)

    monkeypatch.setattr(server, "start_in_background", start_late)
    try:
        found = ensure_server(fake_home, CLEAN)
        state = read_state(fake_home)
        assert state is not None and found.mode == "local"
        assert str(state.port) != others[0].args[-1], "a run would have gone to the other's server"
        assert listens(local_pid(fake_home), state.port)
        assert not listens(local_pid(fake_home), state.port + 1000)
    finally:
        others[0].kill()
        others[0].wait()


def test_a_server_that_hangs_is_started_again(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_server(fake_home, CLEAN)
    os.kill(pid := local_pid(fake_home), signal.SIGSTOP)
    monkeypatch.setattr(server, "HUNG_S", 0.0)
    stop = BackgroundProcess.stop
    monkeypatch.setattr(BackgroundProcess, "stop", lambda self: stop(self, grace_s=0.1))
    assert ensure_server(fake_home, CLEAN).mode == "local"
    assert local_pid(fake_home) != pid


def test_an_older_prefects_server_is_replaced_and_a_newer_ones_kept(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_server(fake_home, CLEAN)
    pid = local_pid(fake_home)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.10.0")
    ensure_server(fake_home, CLEAN)
    assert (newer := local_pid(fake_home)) != pid
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.9.1")
    ensure_server(fake_home, CLEAN)
    assert local_pid(fake_home) == newer


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"process": null}'])
def test_a_damaged_state_file_is_no_state(fake_home: Home, damage: str) -> None:
    fake_home.prefect.mkdir(parents=True)
    state_path(fake_home).write_text(damage)
    assert read_state(fake_home) is None
    assert ensure_server(fake_home, CLEAN).mode == "local"


def test_a_process_that_got_the_servers_number_is_neither_used_nor_stopped(
    fake_home: Home,
) -> None:
    ensure_server(fake_home, CLEAN)
    stop_server(fake_home)
    document = json.loads(state_path(fake_home).read_text())
    document["process"]["pid"] = os.getpid()
    state_path(fake_home).write_text(json.dumps(document))
    assert not stop_server(fake_home)
    ensure_server(fake_home, CLEAN)
    assert local_pid(fake_home) != os.getpid()


def test_stopping_twice_is_fine(fake_home: Home) -> None:
    assert not stop_server(fake_home)
    ensure_server(fake_home, CLEAN)
    state = read_state(fake_home)
    assert stop_server(fake_home)
    assert state is not None
    assert not state.process.is_alive()
    assert not stop_server(fake_home)


# ---- no local server -----------------------------------------------------------------------


def test_a_server_that_does_not_start_gives_way_to_an_ephemeral_one(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [sys.executable, FAKE, "0", "broken"]
    monkeypatch.setattr(server, "server_command", lambda port: broken)
    with caplog.at_level(logging.WARNING):
        answer = ensure_server(fake_home, CLEAN)
    assert (answer.mode, answer.api_url) == ("ephemeral", None)
    assert str(fake_home.prefect / "server.log") in answer.reason
    assert "database is locked" in caplog.text, "the log's end says why"


def test_a_home_that_cannot_be_written_gives_way_to_an_ephemeral_server(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    answer = ensure_server(Home(root=tmp_path / "home"), CLEAN)
    assert answer.mode == "ephemeral"
    assert "Not a directory" in answer.reason


def test_the_users_own_server_is_used_as_it_is(prefect_server: str, tmp_path: Path) -> None:
    home = Home(root=tmp_path / "home")
    answer = ensure_server(home, CLEAN | {"PREFECT_API_URL": prefect_server})
    assert answer == Server(mode="configured", api_url=prefect_server)
    assert not home.root.exists()


def test_a_server_that_the_users_profile_names_is_used(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profiles = f'active = "team"\n[profiles.team]\nPREFECT_API_URL = "{prefect_server}"\n'
    (tmp_path / "profiles.toml").write_text(profiles)
    env = CLEAN | {"PREFECT_HOME": str(tmp_path)}
    assert ensure_server(Home(root=tmp_path / "home"), env).api_url == prefect_server


def test_a_users_server_that_is_down_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with pytest.raises(ServerError, match="or unset PREFECT_API_URL to have a local one"):
            ensure_server(Home(root=tmp_path), CLEAN | {"PREFECT_API_URL": url})


@pytest.mark.parametrize("url", ["127.0.0.1:4200/api", "ftp://host/api", "http:///api"])
def test_an_address_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="set it to an address such as"):
        ensure_server(Home(root=tmp_path), CLEAN | {"PREFECT_API_URL": url})


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server on SQLite answers 503 while another writer has the database."""
    monkeypatch.setattr("flows.prefect_api._FIRST_WAIT_S", 0.001)
    api = PrefectApi(str(ensure_server(fake_home, CLEAN).api_url))
    assert api.call("POST", "/busy/2", {}) == []
    monkeypatch.setattr("flows.prefect_api._LONGEST_WAIT_S", 0.001)
    with pytest.raises(ServerError, match="was refused with 503"):
        api.call("POST", "/busy/100", {})
    with pytest.raises(ServerError, match="was refused with 404"):
        api.call("POST", "/missing", {})


def test_entering_a_server_tells_prefect_where_it_is() -> None:
    env: dict[str, str] = {}
    Server(mode="local", api_url="http://127.0.0.1:4201/api").enter(env)
    assert env == {"PREFECT_API_URL": "http://127.0.0.1:4201/api"}
    env = {}
    Server(mode="ephemeral", api_url=None).enter(env)
    assert env == {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}


def test_the_servers_environment_is_closed_to_other_origins(tmp_path: Path) -> None:
    own = server.server_environment(Home(root=tmp_path), 4250, CLEAN)
    assert own["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
    allowed = own["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    assert allowed == "http://127.0.0.1:4250,http://localhost:4250"
    assert own["PREFECT_HOME"] == str(tmp_path / "prefect")


def test_looking_for_a_server_loads_no_prefect(tmp_path: Path) -> None:
    code = "import flows.server, flows.services, sys; print('prefect' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert run.stdout == "False\n"


# ---- background processes ------------------------------------------------------------------

IGNORES_TERM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
print("ready", child, flush=True)
time.sleep(600)
"""

SHOWS_SIGNALS = """
import signal, time
print([signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)])
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
time.sleep(600)
"""


def background(folder: Path, script: str, **options: Any) -> tuple[BackgroundProcess, Path]:
    log = folder / "log"
    command = [sys.executable, "-c", script]
    return start_in_background(command, env=CLEAN, folder=folder, log=log), log


def wait_for(log: Path, num_lines: int) -> list[str]:
    while len(lines := log.read_text().splitlines()) < num_lines:
        pass  # the test's own timeout ends this
    return lines


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    process, log = background(tmp_path, IGNORES_TERM)
    lines = wait_for(log, 2)
    child = BackgroundProcess.of(int(max(line.split()[1] for line in lines)))
    assert child is not None
    process.stop(grace_s=0.2)
    assert not process.is_alive()
    assert not child.is_alive()


def test_children_of_a_leader_that_is_gone_are_stopped_too(tmp_path: Path) -> None:
    process, log = background(tmp_path, IGNORES_TERM)
    lines = wait_for(log, 2)
    child = BackgroundProcess.of(int(max(line.split()[1] for line in lines)))
    assert child is not None
    os.kill(process.pid, signal.SIGKILL)
    process.stop(grace_s=0.2)
    assert not child.is_alive()


def test_signals_are_not_inherited_ignored_or_blocked(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process, log = background(tmp_path, SHOWS_SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGINT, before)
    assert wait_for(log, 3) == ["[True, True]", "True", "set()"]
    process.stop()
    assert not process.is_alive()


def test_a_program_that_is_not_there_is_dead_or_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "python"
    with suppress(OSError):
        process = start_in_background(
            [str(missing)], env=CLEAN, folder=tmp_path, log=tmp_path / "log"
        )
        while process.is_alive():
            pass
    assert "FileNotFoundError" in (tmp_path / "log").read_text()


def test_a_big_log_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.background.MAX_LOG_NBYTES", 10)
    (tmp_path / "log").write_text("x" * 11)
    process, log = background(tmp_path, "print('new', flush=True); import time; time.sleep(600)")
    assert wait_for(log, 1) == ["new"]
    assert (tmp_path / "log.old").read_text() == "x" * 11
    process.stop()

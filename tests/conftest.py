"""What every test gets: folders of its own, a quiet Prefect, and a look at what it left behind.

The environment is set while this file is imported, before any test imports Prefect: its
settings are read once, at import. A server starts only for tests that ask for `prefect_server`.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.tiny_families import Case

SCRATCH = Path(tempfile.mkdtemp(prefix="exeunt-tests-"))
REPOSITORY = Path(__file__).resolve().parents[1]
GRACE_S = 3.0

for _name in [name for name in os.environ if name.startswith(("PREFECT_", "EXEUNT_", "DDO_"))]:
    del os.environ[_name]  # the tests decide; a developer's own settings stay out
os.environ.update(
    EXEUNT_HOME=str(SCRATCH / "exeunt"),
    PREFECT_HOME=str(SCRATCH / "prefect"),
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_SERVER_UI_ENABLED="false",
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false",  # a test without a server fails at once
    PREFECT_LOGGING_TO_API_ENABLED="false",
    PREFECT_LOGGING_LEVEL="WARNING",
    PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED="false",
    PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED="false",
    PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED="false",
    PREFECT_SERVER_SERVICES_FOREMAN_ENABLED="false",
)


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `EXEUNT_HOME` of this test alone, not yet created."""
    folder = tmp_path / "exeunt-home"
    monkeypatch.setenv("EXEUNT_HOME", str(folder))
    return folder


# ---- a Prefect server for the session ------------------------------------------------------


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """The API address of a Prefect server that lives as long as the session does.

    Results go to a folder of the session; heartbeats are off, since their thread costs each
    synchronous flow a second.
    """
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_RESULTS_LOCAL_STORAGE_PATH,
        temporary_settings,
    )

    database = SCRATCH / "prefect-server" / "prefect.db"
    database.parent.mkdir()
    template = _template()
    if template.exists():
        shutil.copy(template, database)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    with ExitStack() as stack:
        log = stack.enter_context((database.parent / "server.log").open("wb"))
        start = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        server = subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, *start, "--port", str(port)],
            env=os.environ
            | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        stack.callback(_stop, server)
        _wait_until_healthy(server, port, database.parent / "server.log")
        if not template.exists():
            _save_template(database, template)
        os.environ["PREFECT_API_URL"] = url
        stack.callback(os.environ.pop, "PREFECT_API_URL", None)
        stack.enter_context(
            temporary_settings(
                {
                    PREFECT_API_URL: url,
                    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
                    PREFECT_RESULTS_LOCAL_STORAGE_PATH: str(SCRATCH / "results"),
                }
            )
        )
        yield url


# PR_SET_PDEATHSIG survives exec: a killed test session leaves no server behind.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


def _template() -> Path:
    """A database with all migrations done, kept per Prefect version: they take seconds."""
    version = importlib.metadata.version("prefect")
    return Path(tempfile.gettempdir()) / f"exeunt-tests-{os.getuid()}" / f"prefect-{version}.db"


def _save_template(database: Path, template: Path) -> None:
    template.parent.mkdir(mode=0o700, exist_ok=True)
    partial = template.with_name(f"{template.name}.{os.getpid()}")
    source = sqlite3.connect(database)
    try:
        source.execute("VACUUM INTO ?", (str(partial),))
    finally:
        source.close()
    partial.replace(template)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with closing(connection), suppress(OSError):
            connection.request("GET", "/api/health")
            with connection.getresponse() as response:
                if response.status == 200:
                    return
        time.sleep(0.05)
    raise RuntimeError(f"the test server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGKILL)
        server.wait()


# ---- models --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives a family's tiny model, built once a module."""
    root, built = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def model_dir(case: Case) -> Path:
        if case.name not in built:
            built[case.name] = case.build(root / case.name)
        return Path(built[case.name])

    return model_dir


# ---- what a test leaves behind -------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After each test: no thread, no child process, no file in the repository, same folder."""
    before = _traces()
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := _traces() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left behind by this test: {', '.join(sorted(left))}"


def _traces() -> set[str]:
    threads = {
        f"thread {thread.name}-{thread.ident}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }
    files = {f"file {entry.name} in the repository" for entry in REPOSITORY.iterdir()}
    return threads | _children() | files | {f"folder {Path.cwd()}"}


def _children() -> set[str]:
    """Living and zombie children of this process; Python's own trackers stay for good."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread ended, or the kernel keeps no list
            for pid in (task / "children").read_text().split():
                command = _command(int(pid))
                if "resource_tracker" not in command:
                    found.add(f"process {pid}: {command}")
    return found


def _command(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()[:200] or "zombie"

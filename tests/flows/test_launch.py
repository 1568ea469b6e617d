"""What launchers make, by either method, and what is left when they or their flow are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.launch import Launcher
from flows.session import StageSession
from stages.errors import StageCancelled
from tests.support.fake_stages import ENVIRON, LIGHT_PRELOAD
from tests.support.stage_processes import ask, eventually, is_alive, running, wait_for_death

REPOSITORY = Path(__file__).resolve().parents[2]

# ---- what a child is -----------------------------------------------------------------------


def test_both_methods_make_the_same_kind_of_process(launcher: Launcher) -> None:
    with StageSession("encode", launcher) as session:
        facts = ask(session, "facts", ["torch", "prefect", "flows"])["answer"]

    assert facts == {
        "modules": [],
        "is_leader": True,
        "num_fds": 6,  # 0 to 2, request, event, lifeline
        "inheritable": [],  # by programs that the stage starts
        "folder": str(Path.cwd()),
        "offline": "1",
        "sigint": True,
    }


def test_children_draw_different_random_numbers(launcher: Launcher) -> None:
    numbers = set()
    for _ in range(2):
        with StageSession("encode", launcher) as session:
            numbers.add(ask(session, "random")["answer"])

    assert len(numbers) == 2


def test_closing_while_the_fork_server_still_imports_cancels_the_request() -> None:
    preload = ["tests.support.fake_stages:preload_slowly"]
    with Launcher(preload=preload, environ=ENVIRON) as launcher:
        session = StageSession("encode", launcher)
        with running(session, "echo", None) as errors:
            assert eventually(lambda: launcher._server is not None)
            session.close()
        assert [type(error) for error in errors] == [StageCancelled]


def test_a_closed_launcher_starts_nothing() -> None:
    launcher = Launcher("spawn", environ=ENVIRON)
    launcher.close()

    with pytest.raises(StageCancelled, match="its launcher is closed"):
        ask(StageSession("encode", launcher), "echo")


def test_closing_the_launcher_ends_children_that_a_session_still_holds() -> None:
    for method in ("forkserver", "spawn"):
        launcher = Launcher(method, preload=LIGHT_PRELOAD, environ=ENVIRON)
        session = StageSession("encode", launcher)
        pid = ask(session, "echo")["pid"]

        launcher.close()

        assert wait_for_death(pid)
        session.close()


# ---- the death of the flow process ---------------------------------------------------------

FLOW = """
import json, os, sys, time
from pathlib import Path
from flows.launch import Launcher
from flows.session import StageSession
from tests.support.fake_stages import ENVIRON, context, request

def tell(event):
    print(event.kind, getattr(event, "message", ""), flush=True)

method, preload, steps, fork = json.loads(sys.argv[1])
launcher = Launcher(method, preload=preload, environ=ENVIRON)
launcher.start_fork_server()
print("started", flush=True)
session = StageSession("encode", launcher, on_event=tell)
for do, value in steps:
    session.run(request(do, value), context(Path.cwd()))
heavy = {"torch", "diffusers", "transformers", "prefect"}
print("modules", *sorted(heavy & set(sys.modules)), flush=True)
if fork and os.fork() == 0:
    print("forked", flush=True)
time.sleep(60)
"""


class Flow:
    """A flow process of its own in a folder with a space, and every process it leads to."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.mark = f"EXEUNT_TEST_MARK={uuid.uuid4()}"
        folder = folder / "a folder"
        folder.mkdir()
        (folder / "argparse.py").write_text("raise ImportError('out of the working folder')")
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", FLOW, json.dumps(arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), name: value},
        )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        for found in self.process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"the flow ended before it said {line!r}")

    def processes(self) -> set[int]:
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and is_alive(int(folder.name)):
                try:
                    environ = (folder / "environ").read_bytes()
                except OSError:
                    continue
                if self.mark.encode() in environ.split(b"\0"):
                    found.add(int(folder.name))
        return found

    def end(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


SLOW = ["tests.support.fake_stages:preload_slowly"]
LIGHT = list(LIGHT_PRELOAD)


@pytest.mark.parametrize(
    ("method", "preload", "steps", "line", "num_processes"),
    [
        ("forkserver", SLOW, [], "started", 2),
        ("forkserver", LIGHT, [["echo", 1]], "done", 3),
        ("forkserver", LIGHT, [["stick", 0]], "progress asleep", 3),
        ("forkserver", LIGHT, [["grandchild", "pid"]], "progress asleep", 4),
        ("spawn", LIGHT, [["echo", 1]], "done", 2),
        ("spawn", LIGHT, [["stick", 0]], "progress asleep", 2),
        ("spawn", LIGHT, [["grandchild", "pid"]], "progress asleep", 3),
    ],
    ids=[
        "fork server imports",
        "forked child idle",
        "forked child in a native call",
        "forked child waits for a program",
        "spawned child idle",
        "spawned child in a native call",
        "spawned child waits for a program",
    ],
)
def test_no_process_survives_a_killed_flow(
    tmp_path: Path, method: str, preload: list[str], steps: Any, line: str, num_processes: int
) -> None:
    flow = Flow(tmp_path, method, preload, steps, False)
    try:
        flow.wait_for(line)
        assert eventually(lambda: len(flow.processes()) == num_processes)

        flow.process.kill()

        assert eventually(lambda: not flow.processes())
    finally:
        flow.end()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_child_dies_with_its_flow_although_a_fork_of_the_flow_keeps_its_pipes(
    tmp_path: Path, method: str
) -> None:
    flow = Flow(tmp_path, method, LIGHT, [["echo", 1]], True)
    try:
        flow.wait_for("forked")
        flow.process.kill()

        assert eventually(lambda: len(flow.processes()) == 1)  # the flow's own fork
    finally:
        flow.end()


def test_the_flow_process_loads_no_model_library(tmp_path: Path) -> None:
    flow = Flow(tmp_path, "forkserver", LIGHT, [["echo", 1]], False)
    try:
        flow.wait_for("modules")
    finally:
        flow.end()

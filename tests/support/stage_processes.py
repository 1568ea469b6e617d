"""What tests of stage processes share: to ask, to watch, to look a process up in `/proc`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.session import StageSession
from flows.stage_process import Event
from stages.protocol import Progress, Ready
from tests.support import fake_stages

CONTEXT = fake_stages.context(Path("/nonexistent"))


def ask(session: StageSession, do: str, value: Any = None) -> dict[str, Any]:
    """Run one behaviour of the fake stages and give its report."""
    _, report = session.run(fake_stages.request(do, value, session.stage), CONTEXT)
    return report


def is_alive(pid: int) -> bool:
    """Whether any thread runs: a zombie's other threads may still hold its pipes for a moment."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(_state(task) not in "ZX" for task in tasks)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def eventually(fact: Callable[[], bool]) -> bool:
    """Whether a fact comes true; what should happen at once gets 10 s on a busy machine."""
    deadline = time.monotonic() + 10
    while not (is_true := fact()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true


def wait_for_death(pid: int) -> bool:
    return eventually(lambda: not is_alive(pid))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Watcher:
    """Collects events; `asleep` is set once a stage is in the middle of its work."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asleep = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Progress) and event.message == "asleep":
            self.asleep.set()

    @property
    def pid(self) -> int:
        return next(event.pid for event in self.events if isinstance(event, Ready))


@contextmanager
def running(session: StageSession, do: str, value: Any) -> Iterator[list[BaseException]]:
    """A request in a thread of its own; gives the list that its error will be in."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            ask(session, do, value)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield errors
    finally:
        session.close()
        thread.join()

"""How a run tells people where it stands: a live display, plain lines, or JSON lines.

The flow speaks to one `Display`; the command line chooses which. Under a worker nobody has
chosen one, and everything goes to the flow run's log instead.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

from stages.protocol import PREVIEW
from stages.rules import escape_for_terminal

NAME_WIDTH = 9


class Display(Protocol):
    """What a run tells; every method returns at once."""

    def phase_begins(self, stage: str, num_requests: int) -> None:
        """A phase with this many requests begins."""

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        """A request's process says what it is doing; `num_steps` is 0 without steps.

        A preview's activity is `preview` and the picture's path.
        """

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        """A request has its result, found (`cached`) or made."""

    def phase_ends(self, stage: str) -> None:
        """The phase is over and its process has retired."""

    def saved(self, path: str) -> None:
        """A picture lies under this path."""

    def warn(self, message: str) -> None:
        """Something the user should read."""


class LogDisplay:
    """Lines in a log: for a flow run under a worker, and for whoever reads it later."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._logger = logger

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._logger.info("%s: %d requests", stage, num_requests)

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        pass  # steps are shown by the progress artifact; a log line each would be noise

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        how = "found" if cached else f"made in {elapsed_s:.2f} s"
        self._logger.info("%s %s: %s", stage, escape_for_terminal(label), how)

    def phase_ends(self, stage: str) -> None:
        pass

    def saved(self, path: str) -> None:
        self._logger.info("saved %s", escape_for_terminal(path))

    def warn(self, message: str) -> None:
        self._logger.warning("%s", escape_for_terminal(message))


class LineDisplay:
    """One plain line per finished request: for pipes, files and dumb terminals."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._num_done: dict[str, int] = {}
        self._num_requests: dict[str, int] = {}

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._num_done[stage], self._num_requests[stage] = 0, num_requests

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        pass

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._num_done[stage] = self._num_done.get(stage, 0) + 1
        how = "cached" if cached else f"{elapsed_s:.2f} s"
        count = f"{self._num_done[stage]}/{self._num_requests.get(stage, 0)}"
        self._print(f"{stage:<{NAME_WIDTH}} {count:>7}  {how:>8}  {label}")

    def phase_ends(self, stage: str) -> None:
        pass

    def saved(self, path: str) -> None:
        self._print(f"{'saved':<{NAME_WIDTH}} {path}")

    def warn(self, message: str) -> None:
        self._print(f"warning: {message}")

    def _print(self, text: str) -> None:
        print(escape_for_terminal(text), file=self._stream, flush=True)


class JsonDisplay:
    """One JSON document a line: for programs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._print(event="phase_begins", stage=stage, num_requests=num_requests)

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        fields = {"stage": stage, "label": label, "activity": activity}
        if activity.startswith(f"{PREVIEW} "):
            fields |= {"activity": PREVIEW, "preview": activity.removeprefix(f"{PREVIEW} ")}
        self._print(event="step", **fields, step=step, num_steps=num_steps)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        fields = {"stage": stage, "label": label, "cached": cached}
        self._print(event="request_ends", **fields, elapsed_s=round(elapsed_s, 4))

    def phase_ends(self, stage: str) -> None:
        self._print(event="phase_ends", stage=stage)

    def saved(self, path: str) -> None:
        self._print(event="saved", path=path)

    def warn(self, message: str) -> None:
        self._print(event="warn", message=message)

    def _print(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._stream, flush=True)


class LiveDisplay:
    """A bar per phase on a terminal, with the running request's steps."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn(f"{{task.description:<{NAME_WIDTH}}}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
        )
        self._tasks: dict[str, Any] = {}
        self._num_cached: dict[str, int] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While open, the bars are drawn."""
        with self._progress:
            yield

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._tasks[stage] = self._progress.add_task(stage, total=num_requests, note="")
        self._num_cached[stage] = 0

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        note = f"{activity} {step}/{num_steps}" if num_steps else activity
        text = escape_for_terminal(f"{note}  {label}")
        self._progress.update(self._tasks[stage], note=text)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._num_cached[stage] += cached
        self._progress.update(self._tasks[stage], advance=1)

    def phase_ends(self, stage: str) -> None:
        num_cached = self._num_cached[stage]
        self._progress.update(self._tasks[stage], note=f"{num_cached} cached" if num_cached else "")
        self._progress.stop_task(self._tasks[stage])

    def saved(self, path: str) -> None:
        self._console.print(f"saved {escape_for_terminal(path)}", markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        text = f"warning: {escape_for_terminal(message)}"
        self._console.print(text, style="yellow", markup=False, soft_wrap=True)


class Tally:
    """A display that counts finished requests and passes everything on.

    Attributes:
        made: Requests that a stage process did, by stage.
        found: Requests whose result was there, by stage.
    """

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self.made: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._inner.phase_begins(stage, num_requests)

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        self._inner.step(stage, label, activity, step, num_steps)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        (self.found if cached else self.made)[stage] += 1
        self._inner.request_ends(stage, label, cached=cached, elapsed_s=elapsed_s)

    def phase_ends(self, stage: str) -> None:
        self._inner.phase_ends(stage)

    def saved(self, path: str) -> None:
        self._inner.saved(path)

    def warn(self, message: str) -> None:
        self._inner.warn(message)

    def sentence(self) -> str:
        """For people: `9 stage requests run, 3 found`."""
        return f"{self.made.total()} stage requests run, {self.found.total()} found"


_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def showing(display: Display) -> Iterator[None]:
    """While open, runs of this context tell `display`."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def current_display() -> Display:
    """The chosen display, or else the log of the flow run that is active."""
    chosen = _display.get()
    if chosen is not None:
        return chosen
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return LogDisplay(get_run_logger())
    except MissingContextError:
        return LineDisplay(sys.stderr)

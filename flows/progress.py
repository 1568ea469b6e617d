"""A stage's progress in Prefect's UI, without ever making the stage wait for the server."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""An update costs the server about 23 ms: once a second is 2 %."""

SLOW_S = 0.5
"""A server that takes this long for an update has more urgent things to do: no more of them."""

_JOIN_S = 1.0

_current: ContextVar[ProgressPoster | None] = ContextVar("exeunt_progress", default=None)


def report_progress(step: int, num_steps: int, message: str = "") -> None:
    """Say how far the stage around this call is; outside of one, nothing happens.

    Returns at once: at most one update a second is sent, the newest, by a thread of its own,
    and none any more once the server is slow or has refused one.

    Args:
        step: Steps that are finished, 0 to `num_steps`.
        num_steps: 0 when the activity has no steps; then nothing is sent.
        message: A few words.
    """
    if (poster := _current.get()) is not None and num_steps > 0:
        poster.post(100.0 * min(step, num_steps) / num_steps, message)


@contextmanager
def progress_shown(name: str) -> Iterator[None]:
    """Give the task run around this block one progress artifact, if the block lasts a second.

    Args:
        name: What runs; the artifact's key and description are made of it.
    """
    poster = ProgressPoster(name, interval_s=INTERVAL_S, slow_s=SLOW_S)
    token = _current.set(poster)
    try:
        yield
    finally:
        _current.reset(token)
        poster.close()


class ProgressPoster:
    """One artifact and the thread that updates it; the thread starts with the first update.

    Args:
        name: For the artifact's key and description.
        send: Sends percent and message: creates the artifact at the first call and updates it
            at later ones. Replaceable in tests.
        interval_s: Least seconds between two updates, and before the first.
        slow_s: No more updates after one that took longer.
    """

    def __init__(
        self,
        name: str,
        *,
        send: Callable[[float, str], None] | None = None,
        interval_s: float,
        slow_s: float,
    ) -> None:
        self._name = name
        self._send = send or self._send_to_prefect
        self._interval_s = interval_s
        self._slow_s = slow_s
        self._artifact: UUID | None = None
        self._context = copy_context()  # says which run the artifact belongs to
        self._due_s = time.monotonic() + interval_s
        self._latest: tuple[float, str] | None = None  # guarded by _changed, as are the next two
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def post(self, percent: float, message: str) -> None:
        """Have this sent when the next update is due, unless a newer one comes before."""
        with self._changed:
            if self._closed:
                return
            self._latest = (percent, message)
            if self._thread is None and time.monotonic() >= self._due_s:
                self._thread = threading.Thread(
                    target=self._context.run, args=(self._run,), name="progress", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send nothing more; waits a second at most for an update that is on its way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._latest is None or time.monotonic() < self._due_s):
                    due = self._due_s - time.monotonic() if self._latest else None
                    self._changed.wait(due)
                if self._closed or self._latest is None:
                    return
                (percent, message), self._latest = self._latest, None
            started = time.monotonic()
            try:
                self._send(percent, message)
            except Exception as error:  # the server's trouble is never the stage's
                logger.debug("no more progress of %s is shown: %r", self._name, error)
                self._give_up()
                return
            self._due_s = started + self._interval_s
            if time.monotonic() - started > self._slow_s:
                logger.debug("no more progress of %s is shown: the server is slow", self._name)
                self._give_up()
                return

    def _give_up(self) -> None:
        with self._changed:
            self._closed = True

    def _send_to_prefect(self, percent: float, message: str) -> None:
        if self._artifact is None:
            key = re.sub(r"[^a-z0-9]+", "-", f"progress-{self._name}".lower()).strip("-")
            created = create_progress_artifact(percent, key, description=message or self._name)
            self._artifact = cast(UUID, created)  # a coroutine only inside an event loop
        else:
            update_progress_artifact(
                artifact_id=self._artifact, progress=percent, description=message or None
            )

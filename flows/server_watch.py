"""Starts the local Prefect server anew when it ends in the middle of a run.

Prefect's client asks again for about a minute when nobody answers, and a server is back in
seconds, at its port and with its database: the run goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from flows.server import begin
from flows.server_state import log_path, read_state
from flows.settings import Home

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
MAX_STARTS = 3
"""A server that keeps ending has a reason that starting it does not mend."""


class ServerWatch:
    """While entered, a thread looks whether the local server's process lives.

    One that the user stops with `exeunt down` stays down.

    Args:
        env: The environment of a server that is started.
    """

    def __init__(self, home: Home, env: Mapping[str, str]) -> None:
        self.num_starts = 0
        self._home, self._env = home, dict(env)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="exeunt-server-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S) and self.num_starts < MAX_STARTS:
            state = read_state(self._home)
            if state is None or state.was_stopped or state.process.is_alive():
                continue
            self.num_starts += 1
            logger.warning(
                "the Prefect server at %s has ended; starting it anew, its output is in %s",
                state.api_url,
                log_path(self._home),
            )
            begin(self._home, self._env)  # another run may have been quicker; it starts one

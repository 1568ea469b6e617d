"""How far the server is behind with what the batch has done: the batch waits for it.

Prefect's task runs are told to the server as events, which it records at its own rate. A batch
that goes on regardless would leave it minutes behind, with every other call to it waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from uuid import UUID

from prefect.client.orchestration import get_client

logger = logging.getLogger(__name__)

LOOK_EVERY = 200
MOST_BEHIND = 1_000
"""Task runs; what a server of SQLite records in less than a minute."""

WAIT_S = 1.0
GIVE_UP_AFTER_S = 120.0


class Backlog:
    """Counts the task runs of one flow run against those that the server has recorded.

    Args:
        count: Says how many the server has recorded; None if it does not answer.
        most_behind: Task runs that may be unrecorded; more have the caller wait.
    """

    def __init__(self, count: Callable[[], int | None], most_behind: int = MOST_BEHIND) -> None:
        self._count, self._most_behind = count, most_behind
        self._num_sent = 0

    def sends_task_run(self) -> None:
        """A task run is about to start; returns when the server is not too far behind.

        A server that does not get any further for two minutes is waited for no longer.
        """
        self._num_sent += 1
        if self._num_sent % LOOK_EVERY or self._num_sent <= self._most_behind:
            return
        started, seen = time.monotonic(), -1
        while (recorded := self._count()) is not None:
            if self._num_sent - recorded <= self._most_behind:
                return
            if recorded > seen:
                started, seen = time.monotonic(), recorded
            elif time.monotonic() - started > GIVE_UP_AFTER_S:
                logger.warning(
                    "the server has recorded %d of %d task runs and gets no further; the batch "
                    "goes on",
                    recorded,
                    self._num_sent,
                )
                return
            time.sleep(WAIT_S)


def recorded_task_runs(flow_run_ids: Callable[[], list[str]]) -> Callable[[], int | None]:
    """Asks the server how many task runs of these flow runs it has recorded."""

    def count() -> int | None:
        ids = [str(UUID(each)) for each in flow_run_ids()]
        try:
            with get_client(sync_client=True) as client:
                answer = client.request(
                    "POST", "/task_runs/count", json={"flow_runs": {"id": {"any_": ids}}}
                )
                answer.raise_for_status()
                return int(answer.json())
        except Exception as error:  # a server in trouble is no reason to stop painting
            logger.warning("the server does not say how many task runs it has recorded: %r", error)
            return None

    return count

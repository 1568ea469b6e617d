"""Chunks of a batch as sub-flows: Prefect lets go of what it keeps of a flow run when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from prefect import flow
from prefect.runtime import flow_run

from flows.batch.passes import Passes
from flows.batch.rows import PreparedRow
from flows.prefect_api import ServerError

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""What a server of ours takes at most to be started anew."""

_work: ContextVar[Callable[[], None]] = ContextVar("exeunt_chunk")


@flow(name="batch-chunk", flow_run_name="chunk {number}", persist_result=False)
def batch_chunk(number: int, num_rows: int) -> None:
    """One chunk of a batch; it runs inside of the batch alone."""
    del number, num_rows  # they are for people
    _work.get()()


def run_in_sub_flow(
    number: int, rows: Sequence[PreparedRow], passes: Passes, chunk_runs: list[str]
) -> None:
    """Run a chunk; a server that is being started anew costs time, not the batch.

    Raises:
        ServerError: The server has not come back, or was lost in the middle of the chunk.
    """
    state = "waits"

    def run_chunk() -> None:
        nonlocal state
        state = "runs"
        chunk_runs.append(flow_run.id or "")
        passes.run_chunk(rows)
        state = "done"

    token = _work.set(run_chunk)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                batch_chunk(number, len(rows))
                return
            except Exception as error:
                if not is_unreachable(error):
                    raise
                if state == "done":  # the server alone does not know
                    logger.warning("the server was not told that chunk %d is over", number)
                    return
                if state == "runs" or time.monotonic() > deadline:
                    raise ServerError(
                        f"the Prefect server was lost: {error}; what is finished is kept, so "
                        "start the batch again"
                    ) from error
                logger.warning("chunk %d waits for the Prefect server: %s", number, error)
            time.sleep(1.0)
    finally:
        _work.reset(token)


def is_unreachable(error: BaseException | None) -> bool:
    """Whether a server that does not answer is behind an error."""
    from httpx import TransportError

    while error is not None and not isinstance(error, TransportError):
        error = error.__cause__
    return error is not None

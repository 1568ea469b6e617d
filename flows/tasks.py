"""One Prefect task per stage: its key, its retries, and a body that drives a stage process."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Protocol, cast

from prefect import Task, get_run_logger, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.tasks import TaskRunNameCallbackWithParameters, exponential_backoff
from prefect.transactions import get_transaction

from flows.cache import StageKey, VerifiedJSONSerializer, stage_key
from flows.locks import FlockLockManager
from flows.progress import progress_shown, report_progress
from flows.settings import RunSettings
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import RequestError, StageError

__all__ = ["Session", "report_progress", "stage_task"]

NUM_RETRIES = 2
BACKOFF_S = 1.0
JITTER = 0.3
_LONGEST_LABEL = 60


class Session(Protocol):
    """What runs a request: a stage process, started at the first one and retired at the end.

    An implementation must not be a dataclass or a collection: Prefect would walk through it.
    """

    def run(self, request: StageRequest, context: StageContext) -> tuple[StageResult, Any]:
        """The result, and a report that is not part of it."""
        ...


def stage_task(name: str) -> Task[[StageRequest, Session, StageContext], StageResult]:
    """A task that computes one request of the stage `name`, unless its result is there.

    Call it with `(request, session, context)`. Only the request makes the key. Of several
    runs that want one key at a time, one computes. A crash or a timeout of the stage process
    is retried, anything else fails at once. `.with_options(refresh_cache=True)` computes
    again and replaces the result.
    """

    def stage(request: StageRequest, session: Session, context: StageContext) -> StageResult:
        _check_key(name, request)
        started = time.monotonic()
        with progress_shown(f"{name} {request.label}"):
            try:
                result, _ = session.run(request, context)
            except Exception as error:
                if not _is_retryable(error):
                    # Prefect logs an error with its traceback only when retries ran out.
                    _logger().error("%s failed, not retried: %s", name, error, exc_info=error)
                raise
        _logger().info("%s took %.1f s", name, time.monotonic() - started)
        return result

    stage.__name__ = stage.__qualname__ = name
    return task(
        name=name,
        task_run_name=cast(TaskRunNameCallbackWithParameters, _task_run_name),
        persist_result=True,
        result_serializer=VerifiedJSONSerializer(),
        # Prefect's memory of records would answer without looking at the artifacts.
        cache_result_in_memory=False,
        cache_policy=StageKey(
            isolation_level="SERIALIZABLE", lock_manager=FlockLockManager(_locks_folder)
        ),
        retries=NUM_RETRIES,
        retry_delay_seconds=exponential_backoff(BACKOFF_S),
        retry_jitter_factor=JITTER,
        retry_condition_fn=_should_retry,
        log_prints=False,
    )(stage)


def _check_key(name: str, request: StageRequest) -> None:
    """Refuse to run uncached: Prefect only logs when it could not compute a key.

    Raises:
        RequestError: The request is another stage's, or Prefect holds no or another key.
    """
    if request.stage != name:
        raise RequestError(f"task {name} got a request of stage {request.stage}")
    if TaskRunContext.get() is None:
        return  # called as a plain function
    transaction = get_transaction()
    found = None if transaction is None else transaction.key
    if found != (key := stage_key(request)):
        raise RequestError(
            f"task {name} runs under the cache key {found}, not {key}; its result could not be "
            "found again: see the log for why the key was not computed"
        )


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, StageError) and error.retryable


def _should_retry(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    del task, task_run
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and _is_retryable(error)


def _task_run_name(parameters: dict[str, Any]) -> str:
    request: StageRequest = parameters["request"]
    label = request.label or request.digest[:12]
    if len(label) > _LONGEST_LABEL:
        label = f"{label[: _LONGEST_LABEL - 1]}…"
    return f"{request.stage}-{label}"


def _locks_folder() -> Path:
    return RunSettings.from_env().home.locks


def _logger() -> logging.Logger | logging.LoggerAdapter[Any]:
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger(__name__)

"""A stage task retries what can be retried, computes once, and says what went wrong."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings
from prefect.task_runners import ThreadPoolTaskRunner

from flows.cache import stage_key
from flows.locks import FlockLockManager, while_waiting
from flows.tasks import stage_task
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import (
    BorderError,
    ModelError,
    RequestError,
    StageCrashed,
    StageError,
    StageTimeout,
)
from tests.flows.fakes import FakeSession, context, encode_request

encode = stage_task("encode")
at_once = encode.with_options(retry_delay_seconds=0)


@pytest.fixture
def where(prefect_server: str, home: Path, tmp_path: Path) -> Any:
    with temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield context(f"file://{tmp_path / 'store'}", tmp_path)


def one(request: StageRequest, session: FakeSession, where: StageContext) -> State[StageResult]:
    """Run one stage in a flow; the state of its task run."""

    @flow(persist_result=False)
    def one_stage() -> None:
        states.append(at_once(request, session, where, return_state=True))

    states: list[State[StageResult]] = []
    one_stage()
    return states[0]


def pool(max_workers: int) -> Any:
    return ThreadPoolTaskRunner[Any](max_workers=max_workers)


def failing(*errors: BaseException | None) -> FakeSession:
    """A session whose nth run raises the nth error, and which succeeds where it is None."""

    def fail(number: int) -> None:
        if (error := errors[min(number, len(errors)) - 1]) is not None:
            raise error

    return FakeSession(fail)


# ---- retries -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StageCrashed("killed by SIGKILL"), StageTimeout("60 s")])
def test_a_crash_or_a_timeout_is_retried(where: StageContext, error: StageError) -> None:
    session = failing(error, error, None)
    state = one(encode_request(), session, where)
    assert state.is_completed()
    assert len(session.ran) == 3


def test_retries_end(where: StageContext) -> None:
    session = failing(StageCrashed("killed by SIGKILL"))
    state = one(encode_request(), session, where)
    assert state.is_failed()
    with pytest.raises(StageCrashed, match="killed by SIGKILL"):
        state.result()
    assert len(session.ran) == 3


@pytest.mark.parametrize(
    "error",
    [
        RequestError("height is 100; nearest 96 or 112"),
        BorderError("latents hold 3 NaN"),
        ModelError("no vae"),
        KeyError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_again_is_not_retried_and_logged_with_its_traceback(
    where: StageContext, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    session = failing(error)
    with caplog.at_level(logging.ERROR):
        state = one(encode_request(), session, where)
    assert state.is_failed()
    with pytest.raises(type(error)):
        state.result()
    assert len(session.ran) == 1
    (record,) = [each for each in caplog.records if "not retried" in each.message]
    assert record.exc_info is not None
    assert "test_tasks.py" in caplog.text, "the traceback is in the log"


def test_retries_back_off_with_jitter() -> None:
    assert encode.retries == 2
    assert encode.retry_delay_seconds == [1.0, 2.0]
    assert encode.retry_jitter_factor == 0.3


def test_a_failure_leaves_no_record_and_the_next_run_starts_afresh(where: StageContext) -> None:
    session = failing(RequestError("no"), None)
    assert one(encode_request(), session, where).is_failed()
    assert one(encode_request(), session, where).name == "Completed"


# ---- names and inputs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("red fox", "encode-red fox"),
        ("", f"encode-{encode_request().digest[:12]}"),
        ("{request.seed}", "encode-{request.seed}"),
        ("x" * 80, f"encode-{'x' * 59}…"),
    ],
)
def test_a_task_run_is_named_after_its_label(where: StageContext, label: str, name: str) -> None:
    @flow(persist_result=False)
    def named() -> str:
        state = encode(encode_request(label=label), FakeSession(), where, return_state=True)
        return str(state.state_details.task_run_id)

    run_id = named()
    with get_client(sync_client=True) as client:
        for _ in range(200):  # task runs are recorded after the fact
            found = client.read_task_runs(
                task_run_filter=TaskRunFilter.model_validate({"id": {"any_": [run_id]}})
            )
            if found and found[0].state is not None and found[0].state.is_final():
                break
            time.sleep(0.05)
    assert [run.name for run in found] == [name]


def test_a_request_of_another_stage_is_refused(where: StageContext) -> None:
    session = FakeSession()
    request = encode_request().model_copy(update={"stage": "denoise"})
    state = one(request, session, where)
    with pytest.raises(RequestError, match="task encode got a request of stage denoise"):
        state.result()
    assert session.ran == []


def test_a_key_that_cannot_be_computed_fails_the_task(
    where: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect itself would go on without a cache and call the run a success."""

    def fail(*arguments: object, **keywords: object) -> str:
        raise OSError("no results folder")

    monkeypatch.setattr("flows.cache.guard", fail)
    session = FakeSession()
    state = one(encode_request(), session, where)
    with pytest.raises(RequestError, match="runs under the cache key None"):
        state.result()
    assert session.ran == []


def test_only_the_request_is_part_of_the_key(where: StageContext, tmp_path: Path) -> None:
    session = FakeSession()
    one(encode_request(), session, where)
    elsewhere = where.model_copy(update={"device": "cuda:1", "num_threads": 3, "run_id": "b"})
    assert one(encode_request(), FakeSession(), elsewhere).name == "Cached"


def test_a_task_is_a_plain_function_outside_of_prefect(tmp_path: Path) -> None:
    session = FakeSession()
    where = context(str(tmp_path), tmp_path)
    result = encode.fn(encode_request(), session, where)
    assert result.stage == "encode"
    assert len(session.ran) == 1


# ---- races ---------------------------------------------------------------------------------


def test_of_five_racers_on_one_key_one_computes(where: StageContext) -> None:
    session = FakeSession(takes_s=0.3)

    @flow(persist_result=False, task_runner=pool(5))
    def race() -> list[str]:
        futures = [encode.submit(encode_request(), session, where) for _ in range(5)]
        for future in futures:
            future.wait()
        return sorted(str(future.state.name) for future in futures)

    assert race() == ["Cached"] * 4 + ["Completed"]
    assert len(session.ran) == 1


def test_a_task_that_waits_for_a_result_gives_its_device_up(
    where: StageContext, home: Path
) -> None:
    """Else the run that makes the result, and needs the device, would wait for this one."""
    elsewhere = FlockLockManager(home / "locks")
    request, session = encode_request(), FakeSession()
    elsewhere.acquire_lock(stage_key(request), "another run")

    with while_waiting(lambda: elsewhere.release_lock(stage_key(request), "another run")):
        assert one(request, session, where).is_completed()
    assert len(session.ran) == 1


def test_different_keys_do_not_wait_for_each_other(where: StageContext) -> None:
    together = threading.Barrier(3, timeout=30)

    def meet(number: int) -> None:
        together.wait()

    session = FakeSession(meet)

    @flow(persist_result=False, task_runner=pool(3))
    def rows() -> list[str]:
        requests = [encode_request(f"fox {number}") for number in range(3)]
        futures = [encode.submit(request, session, where) for request in requests]
        return [str(future.wait() or future.state.name) for future in futures]

    assert rows() == ["Completed"] * 3


def test_a_lock_does_not_outlive_a_failed_run(where: StageContext, home: Path) -> None:
    one(encode_request(), failing(RequestError("no")), where)
    assert list((home / "locks").iterdir()) == []


# ---- a flow that is retried ----------------------------------------------------------------


def test_a_retried_flow_does_not_run_finished_stages_again(where: StageContext) -> None:
    session = FakeSession()
    decode_fails = [True]

    @flow(persist_result=False, retries=1)
    def flaky() -> list[str]:
        state = encode(encode_request(), session, where, return_state=True)
        if decode_fails.pop() if decode_fails else False:
            raise RuntimeError("decode failed")
        return [str(state.name)]

    assert flaky() == ["Cached"]
    assert len(session.ran) == 1

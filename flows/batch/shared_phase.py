"""A phase that the rows of a batch share: one process for all, each row its own requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.batch.ahead import AheadSession
from flows.batch.scope import RowPaused
from flows.cache import stage_key
from flows.locks import FlockLockManager, while_waiting
from flows.phase import Phase
from flows.run import Run
from stages.contracts import StageContext, StageName, StageRequest, StageResult

if TYPE_CHECKING:
    from flows.batch.passes import Passes

AHEAD = "ahead"
"""Holds the lock of a result whose request was sent ahead, until its task run does."""

NUM_RETRIES = 1
"""A row whose process died gets one more, fresh; then the row is at fault, not the machine."""


class SharedPhase(Phase):
    """A phase of one run, for whichever row is at work.

    A result that the store has makes no Prefect task run.
    """

    def __init__(self, run: Run, stage: StageName, session: AheadSession, passes: Passes) -> None:
        super().__init__(run, stage, session=session, num_retries=NUM_RETRIES)
        self._passes, self._ahead = passes, session
        # A process may record a result before its task run begins, which has to tell of it.
        self._task_ahead = self._task.with_options(refresh_cache=True)
        self._locks = FlockLockManager(run.settings.home.locks)
        self._locked: set[str] = set()

    def __call__(
        self, *inputs: StageResult, label: str = "", seed: int | None = None, **options: Any
    ) -> StageResult:
        work = self._passes.work
        if work.is_recalling:
            return work.recall()
        label = f"{work.row.id}: {label}"
        request = self._run.request(self._stage, inputs, seed=seed, label=label, options=options)
        self._passes.inspected.add(self._run)
        if self._passes.is_looking_ahead:
            self._send_ahead(request)
            raise RowPaused(self._stage)
        result = self.answer(request)
        work.has(result)
        return result

    def _send_ahead(self, request: StageRequest) -> None:
        """Have the process work on what its turn is next, if nobody has or makes it."""
        if self._run.fresh or self._ahead.has_ahead(request) or self._shortage.is_expected(request):
            return
        key = stage_key(request)
        if self._known(request) or not self._locks.acquire_lock(key, AHEAD, acquire_timeout=0):
            return
        self._locked.add(key)
        self._ahead.send_ahead(request, self._run.context)
        self._passes.has_sent = True

    def _unlock(self, key: str) -> None:
        if key in self._locked:
            self._locked.discard(key)
            self._locks.release_lock(key, AHEAD)

    def leave(self) -> None:
        """The pass is over."""
        for key in [*self._locked]:
            self._unlock(key)

    def run(
        self, request: StageRequest, context: StageContext
    ) -> tuple[StageResult, dict[str, Any]]:
        work = self._passes.work
        work.is_tried(request.stage)
        result, report = super().run(request, context)
        work.is_reported(report)
        if self._run.fresh:
            self._passes.made.add(request.digest)
        return result, report

    def _result(self, request: StageRequest) -> StageResult:
        self._passes.work.begins(request)
        return super()._result(request)

    def _run_task(self, request: StageRequest, context: StageContext) -> StageResult:
        has_ahead = self._ahead.has_ahead(request)
        if not has_ahead and (found := self._known(request)) is not None:
            return found
        self._passes.backlog.sends_task_run()
        self._unlock(stage_key(request))  # the task run takes the lock of its own
        if not has_ahead:
            return super()._run_task(request, context)
        with while_waiting(self._session.rest):
            return self._task_ahead(request, self, context)

    def _is_known(self, request: StageRequest) -> bool:
        return self._known(request) is not None

    def _known(self, request: StageRequest) -> StageResult | None:
        if self._run.fresh and request.digest not in self._passes.made:
            return None
        return self._run.store.lookup(request)

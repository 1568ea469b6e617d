"""A phase that the rows of a batch share: one process for all, each row its own requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flows.run import Phase, Run
from flows.session import StageSession
from stages.contracts import StageContext, StageName, StageRequest, StageResult

if TYPE_CHECKING:
    from flows.batch.passes import Passes

NUM_RETRIES = 1
"""A row whose process died gets one more, fresh; then the row is at fault, not the machine."""


class SharedPhase(Phase):
    """A phase of one run, for whichever row is at work.

    A result that the store has makes no Prefect task run.
    """

    def __init__(self, run: Run, stage: StageName, session: StageSession, passes: Passes) -> None:
        super().__init__(run, stage, session=session, num_retries=NUM_RETRIES)
        self._passes = passes

    def __call__(
        self, *inputs: StageResult, label: str = "", seed: int | None = None, **options: Any
    ) -> StageResult:
        work = self._passes.work
        if work.is_recalling:
            return work.recall()
        label = f"{work.row.id}: {label}"
        result = super().__call__(*inputs, label=label, seed=seed, **options)
        work.has(result)
        return result

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
        if (found := self._known(request)) is not None:
            return found
        self._passes.backlog.sends_task_run()
        return super()._run_task(request, context)

    def _is_known(self, request: StageRequest) -> bool:
        return self._known(request) is not None

    def _known(self, request: StageRequest) -> StageResult | None:
        if self._run.fresh and request.digest not in self._passes.made:
            return None
        return self._run.store.lookup(request)

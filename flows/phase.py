"""`Phase`: one phase of a run, called with the inputs and options of each request.

A request that has a result is answered with it; any other runs as a Prefect task in the phase's
own process, which starts with the first one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flows.fallbacks import Shortage
from flows.launch import shared_launcher
from flows.locks import while_waiting
from flows.progress import report_progress
from flows.session import StageSession
from flows.tasks import stage_task
from stages.contracts import StageContext, StageName, StageRequest, StageResult
from stages.errors import StageError, StageOutOfMemory
from stages.protocol import PREVIEW, Done, Failed, Progress, Ready, Warn

if TYPE_CHECKING:
    from flows.run import Run


class Phase:
    """One phase of a run: call it to run a request in the phase's own process.

    Args:
        session: Has the process; by default one that tells the run's display.
        num_retries: How often a request is tried again whose process died.
    """

    def __init__(
        self,
        run: Run,
        stage: StageName,
        *,
        session: StageSession | None = None,
        num_retries: int | None = None,
    ) -> None:
        self._run, self._stage = run, stage
        self._label = self._preview = ""
        self._ran = False
        self._session = session or StageSession(
            stage,
            shared_launcher(run.settings.launch),
            timeout_s=run.timeout_s,
            on_event=self.tell,
        )
        self._task = stage_task(stage)
        if num_retries is not None:
            self._task = self._task.with_options(retries=num_retries)
        if run.fresh:
            self._task = self._task.with_options(refresh_cache=True)
        self._shortage = Shortage(
            self._run_task,
            run.display.warn,
            may_tile=run.may_tile,
        )

    def __call__(
        self,
        *inputs: StageResult,
        label: str = "",
        seed: int | None = None,
        **options: Any,
    ) -> StageResult:
        """Run one request, or find its result.

        Args:
            inputs: Results of earlier phases.
            label: For people, in logs and displays.
            seed: Seeds the phase's generator; kept out of phases that draw nothing.
            options: The pipeline's own arguments for this phase; None means its default.

        Raises:
            StageError: The phase failed; the class says how.
        """
        request = self._run.request(self._stage, inputs, seed=seed, label=label, options=options)
        return self.answer(request)

    def answer(self, request: StageRequest) -> StageResult:
        """Run a request, or find its result.

        Raises:
            StageError: The phase failed; the class says how.
        """
        self._label = label = request.label
        self._preview = ""
        self._ran = False
        if self._run.fresh and self._stage == "denoise":  # its own ones still serve its retries
            self._run.store.checkpoints(request).clear()
        start = time.perf_counter()
        about = {"stage": self._stage, "label": label, "request_digest": request.digest}
        try:
            result = self._result(request)
        except StageError as error:
            kind = type(error).__name__
            self._run.journal.write("failure", **about, error=kind, message=str(error))
            raise
        elapsed_s = time.perf_counter() - start
        self._run.journal.write(
            "request",
            **about,
            cached=not self._ran,
            elapsed_s=round(elapsed_s, 6),
            artifacts={role: ref.digest for role, ref in result.artifacts.items()},
        )
        self._run.display.request_ends(
            self._stage, label, cached=not self._ran, elapsed_s=elapsed_s
        )
        if self._stage == "encode" and not self._ran:
            self._run.tell_truncation(result)  # a process that runs tells it itself
        return result

    def run(
        self, request: StageRequest, context: StageContext
    ) -> tuple[StageResult, dict[str, Any]]:
        """Called by the task on a cache miss: have the phase's process do the request."""
        self._ran = True
        result, report = self._session.run(request, context)
        self._run.keep_report(request, report)
        return result, report

    def _result(self, request: StageRequest) -> StageResult:
        """Run a request; one that is too large for the device in a way that needs less memory."""
        context = self._run.context
        if self._shortage.is_expected(request) and not self._is_known(request):
            return self._shortage.run_with_less(request, context)
        try:
            return self._run_task(request, context)
        except StageOutOfMemory as error:
            return self._shortage.run_with_less(request, context, error)

    def _run_task(self, request: StageRequest, context: StageContext) -> StageResult:
        # A run that computes this very result may be waiting for the device that our idle
        # process holds: while we wait for the result, the process goes.
        with while_waiting(self._session.rest):
            return self._task(request, self, context)

    def _is_known(self, request: StageRequest) -> bool:
        return not self._run.fresh and self._run.store.lookup(request) is not None

    def retire(self) -> None:
        """End the phase's process, if it ever started."""
        self._session.close()

    def tell(self, event: Ready | Progress | Warn | Done | Failed) -> None:
        match event:
            case Progress():
                activity = event.activity
                if activity == PREVIEW:
                    self._preview = f"{PREVIEW} {event.message}"
                    activity = self._preview
                self._run.display.step(
                    self._stage, self._label, activity, event.step, event.num_steps
                )
                report_progress(event.step, event.num_steps, self._preview or activity)
            case Warn():
                self._run.display.warn(event.message)
            case _:
                pass

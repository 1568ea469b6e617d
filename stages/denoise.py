"""Denoise: noise to `latents`, step by step, under the prompt's embeddings."""

from __future__ import annotations

from typing import Any

from stages.checkpoints import StepCheckpoints
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import BorderError, RequestError
from stages.execute import Events, Job, finish_handover, loaded_pipe, open_job, run_job
from stages.latents import describe_latents
from stages.loop import FiniteWatch, watched


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Denoise the latents of one request, drawn by a CPU generator from its seed.

    Raises:
        BorderError: The latents stopped being finite (the step is named) or are constant.
    """
    job = open_job(request, context, events)
    _require_negatives(job)
    pipe = loaded_pipe(job)
    watch = FiniteWatch(job.family.carried)

    checkpoints = _open_checkpoints(job, watch)

    def on_step(num_done: int, num_steps: int) -> None:
        job.tracker.step(num_steps)
        events.progress("running", num_done, num_steps)

    with watched(pipe._blocks, on_step, watch, checkpoints):
        try:
            made = run_job(job, pipe)
        except BorderError as error:
            step = watch.first_bad_step()
            if step is None:
                raise
            raise BorderError(f"{error} (first seen after step {step})") from error
    facts = {"latents": describe_latents(pipe, made.values, job.family.layout)}
    if checkpoints is None:
        return finish_handover(job, "latents", made, facts)
    job.tracker.facts["resumed_from_step"] = checkpoints.resumed_from_step
    job.tracker.facts["checkpoints"] = checkpoints.report()
    finished = finish_handover(job, "latents", made, facts)
    checkpoints.clear()
    return finished


def _open_checkpoints(job: Job, watch: FiniteWatch) -> StepCheckpoints | None:
    """The checkpoints of this request; None where the context wants none."""
    context = job.context
    if context.checkpoint_every_steps is None and context.checkpoint_every_s is None:
        return None

    def warn(message: str) -> None:
        job.tracker.warnings.append(message)
        job.events.warn(message)

    return StepCheckpoints(
        job.store.checkpoints(job.request),
        every_steps=context.checkpoint_every_steps,
        every_s=context.checkpoint_every_s,
        device=context.device,
        warn=warn,
        is_sound=lambda: watch.first_bad_step() is None,
        on_resume=lambda step, num_steps: job.events.progress("resumed", step, num_steps),
    )


def _require_negatives(job: Job) -> None:
    """Guidance without its other half would be switched off by the pipeline without a word."""
    scale = max(job.guidance.values(), default=0.0)
    names = [n for n in job.graph.input_names("denoise") if n.startswith("negative_")]
    if scale > 1 and names and all(job.handed.values.get(name) is None for name in names):
        raise RequestError(
            f"guidance_scale {scale:g} needs negative embeddings, but the prompt was encoded "
            "without them; encode it with do_classifier_free_guidance, or set guidance_scale to 1"
        )

"""Denoise: noise to `latents`, step by step, under the prompt's embeddings."""

from __future__ import annotations

from typing import Any

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

    def on_step(num_done: int, num_steps: int) -> None:
        job.tracker.step(num_steps)
        events.progress("running", num_done, num_steps)

    with watched(pipe._blocks, on_step, watch):
        try:
            made = run_job(job, pipe)
        except BorderError as error:
            step = watch.first_bad_step()
            if step is None:
                raise
            raise BorderError(f"{error} (first seen after step {step})") from error
    facts = {"latents": describe_latents(pipe, made.values)}
    return finish_handover(job, "latents", made, facts)


def _require_negatives(job: Job) -> None:
    """Guidance without its other half would be switched off by the pipeline without a word."""
    scale = max(job.guidance.values(), default=0.0)
    names = [n for n in job.graph.input_names("denoise") if n.startswith("negative_")]
    if scale > 1 and names and all(job.handed.values.get(name) is None for name in names):
        raise RequestError(
            f"guidance_scale {scale:g} needs negative embeddings, but the prompt was encoded "
            "without them; encode it with do_classifier_free_guidance, or set guidance_scale to 1"
        )

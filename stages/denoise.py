"""Denoise: noise to `latents`, step by step, under the prompt's embeddings."""

from __future__ import annotations

from typing import Any

from stages.checkpoints import StepCheckpoints
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import BorderError, RequestError
from stages.execute import Events, Job, finish_handover, loaded_pipe, open_job, run_job
from stages.latents import describe_latents
from stages.loop import FiniteWatch, watched
from stages.previews import Previews, preview_path, read_latent_rgb
from stages.protocol import PREVIEW
from stages.size_rules import spatial_multiple


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
    previews = _open_previews(job)

    def on_step(num_done: int, num_steps: int) -> None:
        job.tracker.step(num_steps)
        events.progress("running", num_done, num_steps)

    look = None if previews is None else previews.step_done
    with watched(pipe._blocks, on_step, watch, checkpoints, look):
        try:
            made = run_job(job, pipe)
        except BorderError as error:
            step = watch.first_bad_step()
            if step is None:
                raise
            raise BorderError(f"{error} (first seen after step {step})") from error
    facts = {"latents": describe_latents(pipe, made.values, job.family.layout)}
    if checkpoints is not None:
        job.tracker.facts["resumed_from_step"] = checkpoints.resumed_from_step
        job.tracker.facts["checkpoints"] = checkpoints.report()
    finished = finish_handover(job, "latents", made, facts)
    for each in (checkpoints, previews):
        if each is not None:
            each.clear()
    return finished


def _open_checkpoints(job: Job, watch: FiniteWatch) -> StepCheckpoints | None:
    """The checkpoints of this request; None where the context wants none."""
    context = job.context
    if context.checkpoint_every_steps is None and context.checkpoint_every_s is None:
        return None

    return StepCheckpoints(
        job.store.checkpoints(job.request),
        every_steps=context.checkpoint_every_steps,
        every_s=context.checkpoint_every_s,
        device=context.device,
        warn=lambda message: _warn(job, message),
        is_sound=lambda: watch.first_bad_step() is None,
        on_resume=lambda step, num_steps: job.events.progress("resumed", step, num_steps),
    )


def _open_previews(job: Job) -> Previews | None:
    """The previews of this request's loop; None where the context wants none."""
    context = job.context
    if context.preview_every_steps is None or not context.preview_dir:
        return None
    model = job.model
    vae, denoiser = (model.components.get(name) for name in ("vae", job.family.denoiser))
    grid = channels = None
    if vae is not None and denoiser is not None:
        multiple = spatial_multiple(vae.config(), denoiser.config())
        height, width = job.options.get("height"), job.options.get("width")
        if isinstance(height, int) and isinstance(width, int):
            grid = (height // multiple, width // multiple)
        channels = vae.config().get("latent_channels") or vae.config().get("z_dim")
    return Previews(
        preview_path(context.preview_dir, job.request.digest),
        every_steps=context.preview_every_steps,
        grid=grid,
        latent_channels=channels if isinstance(channels, int) else None,
        layout=job.family.layout,
        latent_rgb=read_latent_rgb(model.directory),
        on_picture=lambda step, num_steps, path: job.events.progress(
            PREVIEW, step, num_steps, path
        ),
        warn=lambda message: _warn(job, message),
    )


def _warn(job: Job, message: str) -> None:
    job.tracker.warnings.append(message)
    job.events.warn(message)


def _require_negatives(job: Job) -> None:
    """Guidance without its other half would be switched off by the pipeline without a word."""
    scale = max(job.guidance.values(), default=0.0)
    names = [n for n in job.graph.input_names("denoise") if n.startswith("negative_")]
    if scale > 1 and names and all(job.handed.values.get(name) is None for name in names):
        raise RequestError(
            f"guidance_scale {scale:g} needs negative embeddings, but the prompt was encoded "
            "without them; encode it with do_classifier_free_guidance, or set guidance_scale to 1"
        )

"""The forecast of a checked job: what a run of it would need. Loads no Prefect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from stages import rules
from stages.contracts import OffloadChoice
from stages.forecast_records import ModelForecast, Rates
from stages.forecasts import ASSUMED_TOKENS, forecast_model

if TYPE_CHECKING:
    from flows.text_to_image import Job
    from flows.text_to_video import VideoJob


def forecast_job(job: Job, *, choice: OffloadChoice, rates: Rates, **changes: Any) -> ModelForecast:
    """Forecast one picture or video of a job.

    Args:
        choice: Preset and budgets.
        changes: What differs from the job, by the names of `forecast_model`'s arguments.

    Raises:
        ModelError: The directory is no whole model.
        RequestError: The preset plans nothing.
    """
    asked: dict[str, Any] = {}
    guidance = job.guidance_scale or 0.0
    if is_video := hasattr(job, "num_frames"):
        video = cast("VideoJob", job)
        asked = {"num_frames": video.num_frames, "frame_rate": video.frame_rate}
        guidance = max(video.scales.values())
    steps = rules.check_steps(job.num_inference_steps, job.start.strength)
    asked |= {
        "sources": job.model.sources,
        "family": job.family.name,
        "task": job.start.task,
        "height": job.height,
        "width": job.width,
        "num_media": _num_media(job),
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "max_sequence_length": job.max_sequence_length or _tokens(job),
        "encodes_negative": is_video or job.is_guided,
        "dtype": job.dtype,
    }
    return forecast_model(job.model.directory, choice=choice, rates=rates, **asked | changes)


def num_outputs(job: Job) -> tuple[int, int]:
    """How many prompts are encoded, and how many pictures or videos are made of them."""
    return len(job.prompts), len(job.pictures)


def _tokens(job: Job) -> int:
    """What a text encoder without an option for it reads."""
    limits = [each.limit for each in job.family.tokenizers.values()]
    return max((limit for limit in limits if isinstance(limit, int)), default=ASSUMED_TOKENS)


def _num_media(job: Job) -> int:
    """Pictures and videos that are encoded; a video is taken apart by its mask."""
    found = 0
    for name, medium in job.media.items():
        if name == "video":
            found += 2
        elif "mask" not in name:
            found += len(medium) if isinstance(medium, list | tuple) else 1
    return found

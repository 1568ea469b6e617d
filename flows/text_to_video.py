"""What every flow to videos does: its checks, its run, its phases after encode.

A video shares with a picture all but its length: see `flows.text_to_image` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ParamSpec, TypeVar

from flows import text_to_image
from flows.batch.scope import remembered
from flows.from_frames import read_frames
from flows.from_pictures import Start
from flows.from_videos import Control
from flows.run import Run
from flows.settings import RunSettings
from flows.text_to_image import ARGUMENTS, Job, Source, check_job, open_sources
from flows.videos import Video, list_videos, save_video
from stages import rules
from stages.contracts import StageResult
from stages.families import family_named, require_model_of
from stages.models import ModelDirectory
from stages.mp4 import check_frame_rate
from stages.size_rules import check_num_frames, temporal_multiple

P = ParamSpec("P")
R = TypeVar("R")

BYTES_PER_PIXEL = 24
"""A decoded video as float32, and the same once more while it is finished."""

VIDEO_ARGUMENTS = ARGUMENTS | {
    "prompt": "What to show; several prompts make several videos.",
    "image": "The first frame: a path, or where EXEUNT_ALLOW_URLS=1 is set a web address.",
    "video": "A video to follow: a path, or where EXEUNT_ALLOW_URLS=1 is set a web address.",
    "mask_video": "Where the video is made anew: white is made, black is kept.",
    "last_image": "The last frame, where image is the first one.",
    "seed": "0 to 2**64 - 1, or -1 to draw one; the n-th video of a prompt takes seed + n.",
    "num_videos": "Videos per prompt.",
    "height": "Pixels; by default in the form of the picture.",
    "width": "Pixels; by default in the form of the picture.",
    "num_frames": "Frames of a video; 1 and a multiple of what the VAE packs into one.",
    "frame_rate": "Frames a second.",
    "output": "Folder for the videos.",
    "embed_settings": "Write the settings into each video.",
}
"""The arguments that mean the same in every family of videos."""


def documented(function: Callable[P, R]) -> Callable[P, R]:
    """Complete a flow's docstring by the arguments that it leaves to `VIDEO_ARGUMENTS`."""
    return text_to_image.documented(function, VIDEO_ARGUMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoJob(Job):
    """The arguments of one run, checked, with every default filled in.

    Attributes:
        frame_rate: Frames a second.
        other_scales: What the guiders besides the first one are set to, by option.
    """

    num_frames: int
    frame_rate: float
    other_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def scales(self) -> dict[str, float]:
        """What each guider is set to, by option."""
        return {"guidance_scale": self.guidance_scale or 0.0, **self.other_scales}

    @property
    def is_guided(self) -> bool:
        """Whether any guider asks the denoiser a second time, without the prompt."""
        return max(self.scales.values()) > 1

    @property
    def lengths(self) -> dict[str, Any]:
        """What the pipelines call the size of a video, in space and time."""
        return {
            "height": self.height,
            "width": self.width,
            "num_frames": self.num_frames,
            "frame_rate": self.frame_rate,
        }


def open_for_one_of(
    families: Sequence[str], model: str, component: Source = None
) -> tuple[str, ModelDirectory]:
    """The checked model directory, with the family that it is of.

    Args:
        component: As for `stages.component_sources.choose_sources`.

    Raises:
        ModelError: It is not whole, or belongs to none of these families.
    """
    opened = remembered(f"model {model} {component}", lambda: open_sources(model, component))
    for name in families:
        family = family_named(name)
        if opened.class_name in (*family.models, family.pipeline):
            return name, opened
    require_model_of(family_named(families[0]), opened.class_name, str(opened.directory))
    raise AssertionError("the line above raises")


def check_video_job(
    family: str,
    opened: ModelDirectory,
    *,
    default_size: tuple[int, int],
    default_frames: int,
    default_rate: float,
    image: str | None = None,
    last_image: str | None = None,
    read: Control | None = None,
    num_videos: int = 1,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    frame_rate: float | None = None,
    other_scales: Mapping[str, float] | None = None,
    output: str = "videos",
    **others: Any,
) -> VideoJob:
    """Check every argument, against the model's own configuration where it decides.

    Args:
        default_size: Height and width where the caller names none; a picture that it starts from
            keeps its form with as many pixels.
        default_frames: The same for the length; the nearest that this model's VAE can hold.
        read: What the video is made along, where that was read already.
        others: As for `check_job`.

    Raises:
        RequestError: An argument cannot be used; the message says what can.

    Loads no model and starts no process.
    """
    vae = opened.components["vae"].config()
    multiple = temporal_multiple(vae)
    if num_frames is None:
        num_frames = max(default_frames - 1, 0) // multiple * multiple + 1
    num_frames = check_num_frames(num_frames, multiple)
    begins = read or read_frames(
        family_named(family),
        image=image,
        last_image=last_image,
        allow_urls=RunSettings.from_env().allow_urls,
    )
    height, width = begins.size_like(family_named(family), opened, height, width, default_size)
    job = check_job(
        family,
        opened,
        num_images=num_videos,
        height=height,
        width=width,
        start=Start(task=begins.task),
        output=output,
        format="mp4",
        **others,
    )
    start = begins.start(job.height, job.width)
    rules.check_size(
        job.height, job.width, 1, num_frames=num_frames, bytes_per_pixel=BYTES_PER_PIXEL
    )
    return VideoJob(
        **{each.name: getattr(job, each.name) for each in fields(job)}
        | {"start": start, "warnings": (*job.warnings, *start.warnings)},
        num_frames=num_frames,
        frame_rate=check_frame_rate(default_rate if frame_rate is None else frame_rate),
        other_scales={
            name: rules.check_guidance(scale, name) for name, scale in (other_scales or {}).items()
        },
    )


def taken(run: Run, stage: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that a phase's blocks take, whether or not an earlier one tells them, too."""
    facts = run.manifest.phases[stage]
    return {
        name: value for name, value in options.items() if name in (*facts.options, *facts.inputs)
    }


def denoise_videos(
    run: Run,
    job: VideoJob,
    embeds: Sequence[StageResult],
    conditions: Sequence[tuple[StageResult, ...]],
    **options: Any,
) -> list[StageResult]:
    """The denoise phase: latents of every video.

    Args:
        embeds: One per prompt.
        conditions: What else each video starts from, one tuple per video.
        options: What only this family's pipeline takes.
    """
    sized = taken(run, "denoise", job.lengths)
    with run.phase("denoise", len(job.pictures)) as denoise:
        return [
            denoise(
                embeds[n],
                *conditions[k],
                label=job.label(n, seed),
                seed=seed,
                num_inference_steps=job.num_inference_steps,
                **sized,
                **job.scales,
                **options,
            )
            for k, (n, seed) in enumerate(job.pictures)
        ]


def decode_videos(
    run: Run, job: VideoJob, latents: Sequence[StageResult], *, vae_tiling: str, **options: Any
) -> list[StageResult]:
    """The decode phase: the file of every video.

    Args:
        latents: One per video.
        options: What only this family's pipeline takes.
    """
    sized = taken(run, "decode", job.lengths) | {"frame_rate": job.frame_rate}
    with run.phase("decode", len(job.pictures)) as decode:
        return [
            decode(
                latents[k],
                label=job.label(n, seed),
                tiling=True if vae_tiling == "on" else None,
                **sized,
                **options,
            )
            for k, (n, seed) in enumerate(job.pictures)
        ]


def save_videos(
    run: Run,
    job: VideoJob,
    embeds: Sequence[StageResult],
    conditions: Sequence[tuple[StageResult, ...]],
    latents: Sequence[StageResult],
    files: Sequence[StageResult],
    *,
    embed_settings: bool,
) -> list[Video]:
    """Save what a run has made, and list it on the run's page.

    Args:
        embeds: One per prompt.
        conditions, latents, files: One per video.
    """
    videos = [
        save_video(
            run,
            file,
            folder=job.folder,
            save_as=job.save_as,
            embed_settings=embed_settings,
            prompt=job.prompts[n],
            negative_prompt=(job.negative_prompt or "") if job.is_guided else "",
            seed=seed,
            num_inference_steps=job.num_inference_steps,
            guidance_scale=job.scales["guidance_scale"],
            other_scales=job.other_scales,
            height=job.height,
            width=job.width,
            num_frames=job.num_frames,
            frame_rate=job.frame_rate,
            stages={
                "encode": embeds[n],
                **{each.stage: each for each in conditions[k]},
                "denoise": latents[k],
                "decode": file,
            },
        )
        for k, ((n, seed), file) in enumerate(zip(job.pictures, files, strict=True))
    ]
    list_videos(videos)
    return videos

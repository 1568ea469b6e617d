"""Wan VACE as a flow: Wan 2.2 whose transformers look at a video, its mask and pictures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_frames import condition_videos
from flows.from_videos import read_control
from flows.settings import RunSettings
from flows.text_to_image import Source, begin, open_for, run_name, short
from flows.text_to_video import (
    VideoJob,
    check_video_job,
    decode_videos,
    denoise_videos,
    documented,
    save_videos,
)
from flows.videos import Video
from flows.wan import require_usual_vae
from stages import rules
from stages.contracts import OffloadPreset
from stages.errors import ModelError
from stages.families import family_named
from stages.saving import Label

DEFAULT_STEPS, DEFAULT_GUIDANCE, DEFAULT_GUIDANCE_2 = 40, 4.0, 3.0
FAMILY = "wan22-vace"
SIZE, NUM_FRAMES, FRAME_RATE = (480, 832), 81, 16.0
MAX_SEQUENCE_LENGTH = 512


@flow(name="wan-vace", flow_run_name=run_name("wan-vace"), persist_result=False)
@documented
def wan_vace(
    prompt: str | list[str],
    model: str,
    negative_prompt: str = "",
    video: str | None = None,
    mask_video: str | None = None,
    image: str | list[str] | None = None,
    conditioning_scale: float = 1.0,
    seed: int | str = -1,
    num_videos: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    frame_rate: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_scale_2: float = DEFAULT_GUIDANCE_2,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    component: str | list[str] | None = None,
    lora: str | list[str] | None = None,
    blocks: str | list[str] | None = None,
    block_input: str | list[str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offload: OffloadPreset | None = None,
    device_budget: str | int | None = None,
    host_budget: str | int | None = None,
    vae_tiling: Literal["auto", "on", "off"] = "auto",
    output: str = "videos",
    label: Label | None = None,
    embed_settings: bool = True,
    on_truncate: Literal["warn", "error"] = "warn",
    fresh: bool = False,
) -> list[Video]:
    """Make videos along another one, or of pictures, with a Wan 2.2 VACE model.

    Args:
        image: Pictures of what the video is to show, up to 8; they are no frames of it.
        conditioning_scale: How strongly the video and the pictures are followed, by default 1.
        height: Pixels, by default in the form of the video, without one 480.
        width: Pixels, by default in the form of the video, without one 832.
        num_frames: Frames of a video, 4k+1; by default those of the video, at most 81.
        frame_rate: Frames a second, by default those of the video, without one 16.
        num_inference_steps: Denoising steps; by default 40.
        guidance_scale: Weight of the prompt against the negative prompt, by default 4; 1 or less is
            off.
        guidance_scale_2: The same for the second transformer, by default 3.
    """
    job = check(
        prompt=prompt,
        model=model,
        negative_prompt=negative_prompt,
        video=video,
        mask_video=mask_video,
        image=image,
        conditioning_scale=conditioning_scale,
        seed=seed,
        num_videos=num_videos,
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        guidance_scale_2=guidance_scale_2,
        max_sequence_length=max_sequence_length,
        component=component,
        lora=lora,
        blocks=blocks,
        block_input=block_input,
        dtype=dtype,
        device=device,
        offload=offload,
        device_budget=device_budget,
        host_budget=host_budget,
        output=output,
        label=label,
    )
    run = begin(job, vae_tiling=vae_tiling, on_truncate=on_truncate, fresh=fresh)

    with run.phase("encode", len(job.prompts)) as encode:
        embeds = [
            encode(
                label=short(text),
                prompt=text,
                negative_prompt=job.negative_prompt,
                do_classifier_free_guidance=True,  # without it, these blocks of diffusers fail
                max_sequence_length=job.max_sequence_length,
            )
            for text in job.prompts
        ]

    conditions = condition_videos(run, job, embeds, conditioning_scale=conditioning_scale)
    latents = denoise_videos(run, job, embeds, conditions)
    files = decode_videos(run, job, latents, vae_tiling=vae_tiling)
    return save_videos(run, job, embeds, conditions, latents, files, embed_settings=embed_settings)


def check(
    *,
    model: str,
    component: Source = None,
    video: str | None = None,
    mask_video: str | None = None,
    image: str | list[str] | None = None,
    conditioning_scale: float = 1.0,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    guidance_scale_2: float = DEFAULT_GUIDANCE_2,
    **others: Any,
) -> VideoJob:
    """Check every argument, and read what is followed."""
    opened = open_for(FAMILY, model, component)
    require_usual_vae(opened)
    if opened.settings.get("boundary_ratio") is None:
        raise ModelError(
            f"model {model} has one transformer, as Wan 2.1 VACE has, but diffusers' modular "
            "pipeline of VACE takes the two of Wan 2.2; use a Wan 2.2 VACE model"
        )
    rules.check_guidance(conditioning_scale, "conditioning_scale")
    read = read_control(
        family_named(FAMILY),
        opened,
        video=video,
        mask_video=mask_video,
        reference_images=[image] if isinstance(image, str) else image or [],
        height=height,
        width=width,
        num_frames=num_frames,
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        allow_urls=RunSettings.from_env().allow_urls,
    )
    return check_video_job(
        FAMILY,
        opened,
        read=read,
        num_frames=read.num_frames,
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        other_scales={"guidance_scale_2": guidance_scale_2},
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        default_rate=read.frame_rate or FRAME_RATE,
        **others,
    )

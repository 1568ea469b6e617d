"""HunyuanVideo 1.5 as a flow: Qwen2.5-VL, ByT5 for texts in quotes, a transformer, a VAE."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_frames import condition_videos
from flows.text_to_image import Source, begin, run_name, short
from flows.text_to_video import (
    VideoJob,
    check_video_job,
    decode_videos,
    denoise_videos,
    documented,
    open_for_one_of,
    save_videos,
)
from flows.videos import Video
from stages.contracts import OffloadPreset
from stages.saving import Label

DEFAULT_STEPS, DEFAULT_GUIDANCE = 50, 6.0
SIZE, NUM_FRAMES, FRAME_RATE = (480, 848), 121, 24.0


@flow(name="hunyuan-video", flow_run_name=run_name("hunyuan-video"), persist_result=False)
@documented
def hunyuan_video(
    prompt: str | list[str],
    model: str,
    negative_prompt: str = "",
    image: str | None = None,
    seed: int | str = -1,
    num_videos: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    frame_rate: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
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
    """Make videos of prompts, or of a picture and prompts, with a HunyuanVideo 1.5 model.

    Args:
        prompt: What to show; several prompts make several videos. Texts in double quotes are shown
            as texts.
        height: Pixels, by default 480.
        width: Pixels, by default 848.
        num_frames: Frames of a video, 4k+1; by default 121.
        frame_rate: Frames a second, by default 24.
        num_inference_steps: Denoising steps; by default 50.
        guidance_scale: Weight of the prompt against the negative prompt, by default 6; 1 or less is
            off.
    """
    job = check(
        prompt=prompt,
        model=model,
        negative_prompt=negative_prompt,
        image=image,
        seed=seed,
        num_videos=num_videos,
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
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
            )
            for text in job.prompts
        ]

    conditions = condition_videos(run, job, embeds)
    latents = denoise_videos(run, job, embeds, conditions)
    files = decode_videos(run, job, latents, vae_tiling=vae_tiling)
    return save_videos(run, job, embeds, conditions, latents, files, embed_settings=embed_settings)


def check(*, model: str, component: Source = None, **others: Any) -> VideoJob:
    """Check every argument; the model's index says whether it starts from pictures."""
    family, opened = open_for_one_of(("hunyuan-video", "hunyuan-video-i2v"), model, component)
    return check_video_job(
        family,
        opened,
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        default_rate=FRAME_RATE,
        **others,
    )

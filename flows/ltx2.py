"""LTX-2 as a flow: Gemma 3, one transformer for picture and sound, a VAE for each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_frames import condition_videos
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
from stages import size_rules as rules
from stages.contracts import OffloadPreset
from stages.errors import RequestError
from stages.saving import Label

DEFAULT_STEPS, DEFAULT_GUIDANCE, DEFAULT_AUDIO_GUIDANCE = 30, 3.0, 7.0
SIZE, NUM_FRAMES, FRAME_RATE = (512, 704), 121, 24.0
MAX_SEQUENCE_LENGTH = 1024
MAX_CRF = 51  # of H.264
IMAGE_CRF = 33  # of the videos that LTX-2.0 to 2.3 were trained on


@flow(name="ltx2", flow_run_name=run_name("ltx2"), persist_result=False)
@documented
def ltx2(
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
    audio_guidance_scale: float = DEFAULT_AUDIO_GUIDANCE,
    image_crf: int = IMAGE_CRF,
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
    """Make videos with sound of prompts, or of a picture and prompts, with an LTX-2 model.

    Args:
        height: Pixels, by default 512.
        width: Pixels, by default 704.
        num_frames: Frames of a video, 8k+1; by default 121.
        frame_rate: Frames a second, by default 24; the model is told.
        num_inference_steps: Denoising steps; by default 30.
        guidance_scale: Weight of the prompt against the negative prompt in the picture, by default
            3; 1 or less is off.
        audio_guidance_scale: The same for the sound.
        image_crf: How strongly a picture is compressed before it is used, as the model's training
            videos were: 0, not at all, to 51; by default 33.
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
        audio_guidance_scale=audio_guidance_scale,
        image_crf=image_crf,
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

    conditions = condition_videos(run, job, embeds, image_crf=image_crf)
    latents = denoise_videos(run, job, embeds, conditions)
    files = decode_videos(run, job, latents, vae_tiling=vae_tiling)
    return save_videos(run, job, embeds, conditions, latents, files, embed_settings=embed_settings)


def check(
    *,
    model: str,
    component: Source = None,
    audio_guidance_scale: float,
    image_crf: int = IMAGE_CRF,
    **others: Any,
) -> VideoJob:
    """Check every argument."""
    if not 0 <= rules.whole_number(image_crf, "image_crf") <= MAX_CRF:
        raise RequestError(f"image_crf is {image_crf}, allowed are 0 to {MAX_CRF}")
    return check_video_job(
        "ltx2",
        open_for("ltx2", model, component),
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        other_scales={"audio_guidance_scale": audio_guidance_scale},
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        default_rate=FRAME_RATE,
        **others,
    )

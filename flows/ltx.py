"""LTX Video as a flow: a T5 text encoder, a transformer, a VAE with a last step of its own."""

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
from stages import rules
from stages.contracts import OffloadPreset
from stages.saving import Label

DEFAULT_STEPS, DEFAULT_GUIDANCE = 50, 3.0
SIZE, NUM_FRAMES, FRAME_RATE = (512, 704), 161, 25.0
MAX_SEQUENCE_LENGTH = 128
DECODE_TIMESTEP, DECODE_NOISE_SCALE = 0.05, 0.025


@flow(name="ltx", flow_run_name=run_name("ltx"), persist_result=False)
@documented
def ltx(
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
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    decode_timestep: float = DECODE_TIMESTEP,
    decode_noise_scale: float = DECODE_NOISE_SCALE,
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
    """Make videos of prompts, or of a picture and prompts, with an LTX Video model.

    Args:
        height: Pixels, by default 512.
        width: Pixels, by default 704.
        num_frames: Frames of a video, 8k+1; by default 161.
        frame_rate: Frames a second, by default 25; the model is told.
        num_inference_steps: Denoising steps; by default 50.
        guidance_scale: Weight of the prompt against the negative prompt, by default 3; 1 or less is
            off.
        decode_timestep: Where the VAE's own last step begins, 0 to 1; VAEs before 0.9.1 have none.
        decode_noise_scale: Share of noise that is mixed in before that step, 0 to 1.
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
        max_sequence_length=max_sequence_length,
        decode_timestep=decode_timestep,
        decode_noise_scale=decode_noise_scale,
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

    conditions = condition_videos(run, job, embeds)
    latents = denoise_videos(run, job, embeds, conditions)
    files = decode_videos(
        run,
        job,
        latents,
        vae_tiling=vae_tiling,
        decode_timestep=decode_timestep,
        decode_noise_scale=decode_noise_scale,
    )
    return save_videos(run, job, embeds, conditions, latents, files, embed_settings=embed_settings)


def check(
    *,
    model: str,
    component: Source = None,
    decode_timestep: float,
    decode_noise_scale: float,
    **others: Any,
) -> VideoJob:
    """Check every argument."""
    rules.check_share(decode_timestep, "decode_timestep")
    rules.check_share(decode_noise_scale, "decode_noise_scale")
    return check_video_job(
        "ltx",
        open_for("ltx", model, component),
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        default_rate=FRAME_RATE,
        **others,
    )

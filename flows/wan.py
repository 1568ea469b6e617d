"""Wan as a flow: UMT5, one transformer (2.1) or two (2.2), an AutoencoderKLWan."""

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
from stages.errors import ModelError, RequestError
from stages.models import ModelDirectory
from stages.saving import Label

DEFAULTS = {
    "wan": (50, 5.0, None),
    "wan-i2v": (50, 5.0, None),
    "wan22": (40, 4.0, 3.0),
    "wan22-i2v": (40, 3.5, 3.5),
}
"""Steps, and the guidance of each transformer."""

SIZE, NUM_FRAMES, FRAME_RATE = (480, 832), 81, 16.0
MAX_SEQUENCE_LENGTH = 512


@flow(name="wan", flow_run_name=run_name("wan"), persist_result=False)
@documented
def wan(
    prompt: str | list[str],
    model: str,
    negative_prompt: str = "",
    image: str | None = None,
    last_image: str | None = None,
    seed: int | str = -1,
    num_videos: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    frame_rate: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_scale_2: float | None = None,
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
    """Make videos of prompts, or of a picture and prompts, with a Wan 2.1 or 2.2 model.

    Args:
        height: Pixels, by default 480.
        width: Pixels, by default 832.
        num_frames: Frames of a video, 4k+1; by default 81.
        frame_rate: Frames a second, by default 16.
        num_inference_steps: Denoising steps; by default 50, for Wan 2.2 40.
        guidance_scale: Weight of the prompt against the negative prompt, by default 5, for Wan
            2.2 4, with a picture 3.5; 1 or less is off.
        guidance_scale_2: The same for the second transformer of Wan 2.2, by default 3, with a
            picture 3.5.
    """
    job = check(
        prompt=prompt,
        model=model,
        negative_prompt=negative_prompt,
        image=image,
        last_image=last_image,
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

    conditions = condition_videos(run, job, embeds)
    latents = denoise_videos(run, job, embeds, conditions)
    files = decode_videos(run, job, latents, vae_tiling=vae_tiling)
    return save_videos(run, job, embeds, conditions, latents, files, embed_settings=embed_settings)


def check(
    *, model: str, component: Source = None, guidance_scale_2: float | None = None, **others: Any
) -> VideoJob:
    """Check every argument; the model's index says whether it is of two transformers."""
    family, opened = open_for_one_of(("wan", "wan-i2v"), model, component)
    require_usual_vae(opened)
    if opened.settings.get("boundary_ratio") is not None:
        family = family.replace("wan", "wan22")
    steps, scale, second_scale = DEFAULTS[family]
    if guidance_scale_2 is not None and second_scale is None:
        raise RequestError(
            f"guidance_scale_2 belongs to the second transformer of Wan 2.2, but {model} has one; "
            "leave it out"
        )
    second = {}
    if second_scale is not None:
        second["guidance_scale_2"] = second_scale if guidance_scale_2 is None else guidance_scale_2
    return check_video_job(
        family,
        opened,
        default_steps=steps,
        default_guidance=scale,
        other_scales=second,
        default_size=SIZE,
        default_frames=NUM_FRAMES,
        default_rate=FRAME_RATE,
        **others,
    )


def require_usual_vae(opened: ModelDirectory) -> None:
    """Refuse Wan 2.2 TI2V 5B: the pipeline takes its VAE's scale for 8 and paints another size."""
    vae = opened.components["vae"].config()
    counted = 2 ** len(vae.get("temperal_downsample") or ())
    if (scale := vae.get("scale_factor_spatial") or counted) != counted:
        raise ModelError(
            f"the VAE of {opened.directory} has scale {scale}, but diffusers' modular pipeline of "
            f"Wan takes it for {counted} and would paint another size; use a model with a VAE of "
            "scale 8, such as Wan 2.1 or Wan 2.2 A14B"
        )

"""Qwen-Image as a flow: one Qwen2.5-VL text encoder, a transformer, an AutoencoderKLQwenImage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_pictures import condition_pictures
from flows.pictures import Picture
from flows.text_to_image import (
    Job,
    Source,
    begin,
    check_job,
    decode_pictures,
    denoise_pictures,
    documented,
    open_for,
    run_name,
    save_pictures,
    short,
)
from stages.contracts import OffloadPreset
from stages.saving import Label, PictureFormat

DEFAULT_STEPS, DEFAULT_GUIDANCE, DEFAULT_TOKENS = 50, 4.0, 1024


@flow(name="qwen-image", flow_run_name=run_name("qwen-image"), persist_result=False)
@documented
def qwen_image(
    prompt: str | list[str],
    model: str,
    negative_prompt: str = "",
    image: str | None = None,
    mask_image: str | None = None,
    padding_mask_crop: int | None = None,
    strength: float | None = None,
    seed: int | str = -1,
    num_images: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    max_sequence_length: int = DEFAULT_TOKENS,
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
    output: str = "pictures",
    format: PictureFormat = "png",
    quality: int | None = None,
    label: Label | None = None,
    embed_settings: bool = True,
    on_truncate: Literal["warn", "error"] = "warn",
    fresh: bool = False,
) -> list[Picture]:
    """Paint pictures of prompts with a Qwen-Image model.

    Args:
        height: Pixels; by default 1024.
        width: Pixels; by default 1024.
        num_inference_steps: Denoising steps; by default 50.
        guidance_scale: Weight of the prompt against the negative prompt, by default 4; 1 or less is
            off. Known as true_cfg_scale elsewhere.
        max_sequence_length: Tokens of the prompt that are read, up to 1024.
    """
    job = check(
        prompt=prompt,
        model=model,
        negative_prompt=negative_prompt,
        image=image,
        mask_image=mask_image,
        padding_mask_crop=padding_mask_crop,
        strength=strength,
        seed=seed,
        num_images=num_images,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
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
        format=format,
        quality=quality,
        label=label,
    )
    run = begin(job, vae_tiling=vae_tiling, on_truncate=on_truncate, fresh=fresh)

    with run.phase("encode", len(job.prompts)) as encode:
        embeds = [
            encode(
                label=short(text),
                prompt=text,
                negative_prompt=job.negative_prompt if job.is_guided else None,
                do_classifier_free_guidance=job.is_guided,
                max_sequence_length=job.max_sequence_length,
            )
            for text in job.prompts
        ]

    conditions = condition_pictures(run, job, embeds)
    latents = denoise_pictures(run, job, embeds, conditions)
    images = decode_pictures(run, job, latents, vae_tiling=vae_tiling)
    return save_pictures(
        run, job, embeds, latents, images, conditions=conditions, embed_settings=embed_settings
    )


def check(*, model: str, component: Source = None, **others: Any) -> Job:
    """Check every argument."""
    return check_job(
        "qwen-image",
        open_for("qwen-image", model, component),
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        **others,
    )

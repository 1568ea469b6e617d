"""Stable Diffusion XL as a flow: two CLIP text encoders, a UNet, an AutoencoderKL."""

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
from stages.errors import RequestError
from stages.saving import Label, PictureFormat

DEFAULT_STEPS, DEFAULT_GUIDANCE = 50, 5.0
INPAINTING_CHANNELS = 9  # latents, masked image and mask


@flow(name="sdxl", flow_run_name=run_name("sdxl"), persist_result=False)
@documented
def sdxl(
    prompt: str | list[str],
    model: str,
    negative_prompt: str | None = None,
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
    """Paint pictures of prompts with a Stable Diffusion XL model.

    Args:
        negative_prompt: What to keep away from; takes a guidance scale over 1. None is not the same
            as an empty text: most models were trained with zeros for it.
        num_inference_steps: Denoising steps; by default 50.
        guidance_scale: Weight of the prompt against the negative prompt, by default 5; 1 or less is
            off.
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
    """Check every argument; a UNet that was made for inpainting takes the masked picture, too."""
    opened = open_for("sdxl", model, component)
    job = check_job(
        "sdxl",
        opened,
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        **others,
    )
    channels = opened.components["unet"].config().get("in_channels")
    if channels == INPAINTING_CHANNELS and job.start.task != "inpaint":
        raise RequestError(
            f"{opened.directory.name} was made for inpainting; give image and mask_image"
        )
    return job

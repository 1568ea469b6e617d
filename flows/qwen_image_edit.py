"""Qwen-Image-Edit as a flow: its text encoder reads the picture together with the prompt."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_pictures import (
    REFERENCES_LIMIT,
    check_references,
    condition_pictures,
    given,
)
from flows.pictures import Picture
from flows.text_to_image import (
    Job,
    Source,
    begin,
    check_job,
    decode_pictures,
    denoise_pictures,
    documented,
    run_name,
    save_pictures,
    short,
)
from stages.component_sources import choose_sources
from stages.contracts import OffloadPreset
from stages.families import family_named, require_model_of
from stages.models import open_model, resolve_model
from stages.saving import Label, PictureFormat

DEFAULT_STEPS, DEFAULT_GUIDANCE = 50, 4.0
AREA, STEP = 1024 * 1024, 32  # pixels, in all and along an edge


@flow(name="qwen-image-edit", flow_run_name=run_name("qwen-image-edit"), persist_result=False)
@documented
def qwen_image_edit(
    prompt: str | list[str],
    model: str,
    image: str | list[str],
    negative_prompt: str = "",
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
    """Edit a picture by a prompt with a Qwen-Image-Edit model.

    Args:
        prompt: What to change; several prompts make several pictures.
        image: The picture to edit; a model of 2509 or later takes several, as references.
        height: Pixels; by default the first picture's aspect ratio at 1024 x 1024 pixels of area.
        width: Pixels; see height.
        num_inference_steps: Denoising steps; by default 50.
        guidance_scale: Weight of the prompt against the negative prompt, by default 4; 1 or less is
            off. Known as true_cfg_scale elsewhere.
    """
    job = check(
        prompt=prompt,
        model=model,
        image=image,
        negative_prompt=negative_prompt,
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
        pictures = given(run, job, "encode")
        embeds = [
            encode(
                pictures,
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


def taught_size(width: int, height: int) -> tuple[int, int]:
    """Height and width of a megapixel in the picture's form.

    The pipeline looks at the picture in this size: painted in another one, it would shift.
    """
    wide = math.sqrt(AREA * (width / height))
    high = wide / (width / height)
    return round(high / STEP) * STEP, round(wide / STEP) * STEP


def check(*, model: str, component: Source = None, **others: Any) -> Job:
    """Check every argument; the model's class says whether it looks at several pictures."""
    opened = open_model(resolve_model(model), sources=choose_sources(component))
    takes_several = opened.class_name in family_named("qwen-image-edit-plus").models
    family = "qwen-image-edit-plus" if takes_several else "qwen-image-edit"
    require_model_of(family_named(family), opened.class_name, str(opened.directory))
    job = check_job(
        family,
        opened,
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        like=taught_size,
        **others,
    )
    check_references(job.start, most=REFERENCES_LIMIT if takes_several else 1)
    return job

"""FLUX.1 as a flow: CLIP and T5, a transformer with distilled guidance, an AutoencoderKL."""

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

DEV_STEPS, DEV_GUIDANCE, DEV_TOKENS = 28, 3.5, 512
SCHNELL_STEPS, SCHNELL_TOKENS = 4, 256


@flow(name="flux", flow_run_name=run_name("flux"), persist_result=False)
@documented
def flux(
    prompt: str | list[str],
    model: str,
    image: str | None = None,
    strength: float | None = None,
    seed: int | str = -1,
    num_images: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    max_sequence_length: int | None = None,
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
    """Paint pictures of prompts with a FLUX.1 model, dev or schnell.

    Args:
        num_inference_steps: Denoising steps; by default 28, for schnell 4.
        guidance_scale: What the model was taught guidance with, by default 3.5; it takes no
            second pass and no negative prompt. Schnell takes none.
        max_sequence_length: Tokens of the prompt that T5 reads, by default 512, for schnell 256;
            CLIP reads 77.
    """
    job = check(
        prompt=prompt,
        model=model,
        image=image,
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
            encode(label=short(text), prompt=text, max_sequence_length=job.max_sequence_length)
            for text in job.prompts
        ]

    conditions = condition_pictures(run, job, embeds)
    latents = denoise_pictures(run, job, embeds, conditions)
    images = decode_pictures(run, job, latents, vae_tiling=vae_tiling)
    return save_pictures(
        run, job, embeds, latents, images, conditions=conditions, embed_settings=embed_settings
    )


def check(
    *, model: str, component: Source = None, max_sequence_length: int | None = None, **others: Any
) -> Job:
    """Check every argument; schnell is told by its transformer, which takes no guidance."""
    opened = open_for("flux", model, component)
    is_dev = bool(opened.components["transformer"].config().get("guidance_embeds"))
    tokens = DEV_TOKENS if is_dev else SCHNELL_TOKENS
    return check_job(
        "flux",
        opened,
        default_steps=DEV_STEPS if is_dev else SCHNELL_STEPS,
        default_guidance=DEV_GUIDANCE if is_dev else None,
        max_sequence_length=tokens if max_sequence_length is None else max_sequence_length,
        **others,
    )

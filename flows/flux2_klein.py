"""FLUX.2 Klein as a flow: one Qwen3 text encoder, a transformer, an AutoencoderKLFlux2."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from flows.from_pictures import REFERENCES_LIMIT, check_references, condition_pictures
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

DISTILLED_STEPS = 4
BASE_STEPS, BASE_GUIDANCE = 50, 4.0
DEFAULT_TOKENS = 512
LEAST_EDGE, MOST_ASPECT = 64, 8.0  # what its image processor takes


@flow(name="flux2-klein", flow_run_name=run_name("flux2-klein"), persist_result=False)
@documented
def flux2_klein(
    prompt: str | list[str],
    model: str,
    image: str | list[str] | None = None,
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
    """Paint pictures of prompts with a FLUX.2 Klein model, distilled or base.

    Args:
        image: A picture to look at while painting, such as one to edit; several are references.
        num_inference_steps: Denoising steps; by default 4, for a base model 50.
        guidance_scale: Weight of the prompt against an empty one, by default 4; 1 or less is off.
            A distilled model takes none.
        max_sequence_length: Tokens of the prompt that are read, up to 512.
    """
    job = check(
        prompt=prompt,
        model=model,
        image=image,
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
                do_classifier_free_guidance=job.is_guided or None,
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
    """Check every argument; the model's index says whether it is distilled."""
    opened = open_for("flux2-klein", model, component)
    is_distilled = bool(opened.settings.get("is_distilled"))
    job = check_job(
        "flux2-klein" if is_distilled else "flux2-klein-base",
        opened,
        default_steps=DISTILLED_STEPS if is_distilled else BASE_STEPS,
        default_guidance=None if is_distilled else BASE_GUIDANCE,
        **others,
    )
    check_references(
        job.start, most=REFERENCES_LIMIT, least_edge=LEAST_EDGE, most_aspect=MOST_ASPECT
    )
    return job

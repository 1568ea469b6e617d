"""PixArt-Sigma as a flow: a T5 text encoder, a transformer, an AutoencoderKL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

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

DEFAULT_STEPS, DEFAULT_GUIDANCE = 20, 4.5
TAUGHT = (32, 64, 128, 256)  # latents along an edge, of models with a list of sizes
MAX_SEQUENCE_LENGTH = 300  # tokens that the transformer was trained with


@flow(name="pixart", flow_run_name=run_name("pixart"), persist_result=False)
@documented
def pixart(
    prompt: str | list[str],
    model: str,
    negative_prompt: str = "",
    seed: int | str = -1,
    num_images: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    use_resolution_binning: bool = True,
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
    """Paint pictures of prompts with a PixArt-Sigma model.

    Args:
        num_inference_steps: Denoising steps; by default 20.
        guidance_scale: Weight of the prompt against the negative prompt, by default 4.5; 1 or less
            is off.
        use_resolution_binning: Paint the nearest of the sizes that the model was taught, then scale
            and cut the picture to the size that was asked for.
    """
    job = check(
        prompt=prompt,
        model=model,
        negative_prompt=negative_prompt,
        seed=seed,
        num_images=num_images,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        max_sequence_length=max_sequence_length,
        use_resolution_binning=use_resolution_binning,
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
                clean_caption=False,  # it takes markup out of captions, with two more libraries
            )
            for text in job.prompts
        ]

    latents = denoise_pictures(run, job, embeds, use_resolution_binning=use_resolution_binning)
    images = decode_pictures(run, job, latents, vae_tiling=vae_tiling)
    return save_pictures(run, job, embeds, latents, images, embed_settings=embed_settings)


def check(
    *, model: str, component: Source = None, use_resolution_binning: bool, **others: Any
) -> Job:
    """Check every argument; only models of certain sizes have a list of what they were taught."""
    opened = open_for("pixart", model, component)
    edge = opened.components["transformer"].config().get("sample_size")
    if use_resolution_binning and edge not in TAUGHT:
        raise RequestError(
            f"use_resolution_binning needs a model of {', '.join(map(str, TAUGHT))} latents along "
            f"an edge, but {opened.directory.name} has {edge}; give --no-use-resolution-binning"
        )
    return check_job(
        "pixart",
        opened,
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        **others,
    )

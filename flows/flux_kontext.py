"""FLUX.1 Kontext as a flow: FLUX.1 that looks at a picture while it paints, and so edits it."""

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

DEFAULT_STEPS, DEFAULT_GUIDANCE, DEFAULT_TOKENS = 28, 2.5, 512
SIZES = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248)),
    *((880, 1184), (944, 1104), (1024, 1024), (1104, 944), (1184, 880)),
    *((1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672)),
)
"""Width and height of the pictures that the model was taught with."""


@flow(name="flux-kontext", flow_run_name=run_name("flux-kontext"), persist_result=False)
@documented
def flux_kontext(
    prompt: str | list[str],
    model: str,
    image: str | None = None,
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
    """Edit a picture by a prompt with a FLUX.1 Kontext model.

    Args:
        prompt: What to change; several prompts make several pictures.
        image: The picture to edit; without one it paints from the prompt alone.
        height: Pixels; by default that of the sizes the model was taught with whose form is
            nearest to the picture's, which is also the one that it looks at the picture in.
        width: Pixels; see height.
        num_inference_steps: Denoising steps; by default 28.
        guidance_scale: What the model was taught guidance with, by default 2.5; it takes no
            second pass and no negative prompt.
        max_sequence_length: Tokens of the prompt that T5 reads, by default 512; CLIP reads 77.
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
            encode(label=short(text), prompt=text, max_sequence_length=job.max_sequence_length)
            for text in job.prompts
        ]

    conditions = condition_pictures(run, job, embeds)
    # Its blocks scale every size to an area, by default a megapixel: ours is the one asked for.
    max_area = job.height * job.width if job.media else None
    latents = denoise_pictures(run, job, embeds, conditions, max_area=max_area)
    images = decode_pictures(run, job, latents, vae_tiling=vae_tiling)
    return save_pictures(
        run, job, embeds, latents, images, conditions=conditions, embed_settings=embed_settings
    )


def taught_size(width: int, height: int) -> tuple[int, int]:
    """Height and width: the size nearest in form; the pipeline brings the picture to it, too."""
    _, wide, high = min((abs(width / height - w / h), w, h) for w, h in SIZES)
    return high, wide


def check(*, model: str, component: Source = None, **others: Any) -> Job:
    """Check every argument."""
    return check_job(
        "flux-kontext",
        open_for("flux-kontext", model, component),
        default_steps=DEFAULT_STEPS,
        default_guidance=DEFAULT_GUIDANCE,
        like=taught_size,
        **others,
    )

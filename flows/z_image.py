"""Z-Image as a flow: one Qwen3 text encoder, a single-stream transformer, an AutoencoderKL.

This file is the whole integration of a family and the example to copy for another one:
arguments with the family's defaults, their checks, and the phases in reading order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.model_settings import model_settings
from flows.pictures import Picture, list_pictures, save_picture
from flows.run import Run
from flows.settings import RunSettings
from stages import rules
from stages.artifacts import ArtifactStore
from stages.contracts import OffloadChoice, OffloadPreset
from stages.media import check_output_folder
from stages.models import ModelDirectory, open_model, resolve_model
from stages.offload_rules import choose_offload, without_effect

DEFAULT_STEPS = 8
DEFAULT_GUIDANCE = 1.0
LONGEST_LABEL = 60  # characters
MAX_SEQUENCE_LENGTH = 512  # tokens that the text encoder was trained to read


def _run_name() -> str:
    prompt = flow_run.parameters.get("prompt") or ""
    return f"z-image {short(prompt if isinstance(prompt, str) else str(prompt[0]))}"


def short(prompt: str) -> str:
    """A prompt for names, logs and displays: one line, no control characters."""
    line = rules.escape_for_terminal(prompt)
    return line if len(line) <= LONGEST_LABEL else f"{line[: LONGEST_LABEL - 1]}…"


@flow(name="z-image", flow_run_name=_run_name, persist_result=False)
def z_image(
    prompt: str | list[str],
    negative_prompt: str = "",
    seed: int | str = -1,
    num_images: Annotated[int, Field(ge=1, le=10_000)] = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    model: str = "miniature",
    dtype: str = "auto",
    device: str = "auto",
    offload: OffloadPreset | None = None,
    device_budget: str | int | None = None,
    host_budget: str | int | None = None,
    vae_tiling: Literal["auto", "on", "off"] = "auto",
    output: str = "pictures",
    embed_settings: bool = True,
    on_truncate: Literal["warn", "error"] = "warn",
    fresh: bool = False,
) -> list[Picture]:
    """Paint pictures of prompts with a Z-Image model.

    Args:
        prompt: What to paint; several prompts make several pictures.
        negative_prompt: What to keep away from; takes a guidance scale over 1.
        seed: 0 to 2**64 - 1, or -1 to draw one; the n-th image of a prompt takes seed + n.
        num_images: Images per prompt.
        height: Pixels; by default what the model was trained for.
        width: Pixels; by default what the model was trained for.
        num_inference_steps: Denoising steps; by default what the model recommends.
        guidance_scale: Weight of the prompt against the negative prompt; 1 or less is off.
        max_sequence_length: Tokens of the prompt that are read.
        model: A model directory, or miniature for the model that comes with exeunt.
        dtype: float32, bfloat16, float16, or auto for that of the model's files.
        device: cpu, cuda, cuda:N, or auto.
        offload: How weights share a GPU with the work; by default DDO_PRESET, else auto, which
            streams a model's weights only if they do not fit.
        device_budget: Device memory for weights and work, such as 12GiB; by default what is free.
        host_budget: Host memory that may be pinned, such as 8GiB; by default three fifths of
            what is available.
        vae_tiling: Decode in tiles, which takes less memory and changes pixels a little; auto
            does so when a whole decode runs out of memory.
        output: Folder for the pictures.
        embed_settings: Write the settings into each picture.
        on_truncate: warn or error when a prompt is longer than the text encoder reads.
        fresh: Compute everything anew, even what is already there.
    """
    job = check(
        prompt=prompt,
        negative_prompt=negative_prompt,
        seed=seed,
        num_images=num_images,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        max_sequence_length=max_sequence_length,
        model=model,
        dtype=dtype,
        device=device,
        offload=offload,
        device_budget=device_budget,
        host_budget=host_budget,
        output=output,
    )
    run = Run(
        family="z-image",
        task="text-to-image",
        model=job.model,
        model_name=job.model_name,
        dtype=job.dtype,
        device=job.device,
        fresh=fresh,
        on_truncate=on_truncate,
        offload=job.offload,
        may_tile=vae_tiling != "off",
        run_id=flow_run.id or "",
    )
    for warning in job.warnings:
        run.display.warn(warning)
    guided = job.guidance_scale > 1
    if job.negative_prompt and not guided:
        run.display.warn(
            f"negative_prompt has no effect at guidance_scale {job.guidance_scale:g}; set it over 1"
        )

    with run.phase("encode", len(job.prompts)) as encode:
        embeds = [
            encode(
                label=short(text),
                prompt=text,
                negative_prompt=job.negative_prompt if guided else None,
                do_classifier_free_guidance=guided,
                max_sequence_length=job.max_sequence_length,
            )
            for text in job.prompts
        ]

    jobs = [(n, one) for n in range(len(job.prompts)) for one in job.seeds]
    with run.phase("denoise", len(jobs)) as denoise:
        latents = [
            denoise(
                embeds[n],
                label=f"seed {one}, {short(job.prompts[n])}",
                seed=one,
                height=job.height,
                width=job.width,
                num_inference_steps=job.num_inference_steps,
                guidance_scale=job.guidance_scale,
            )
            for n, one in jobs
        ]

    with run.phase("decode", len(jobs)) as decode:
        images = [
            decode(
                latents[k],
                label=f"seed {one}, {short(job.prompts[n])}",
                tiling=True if vae_tiling == "on" else None,
            )
            for k, (n, one) in enumerate(jobs)
        ]

    pictures = [
        save_picture(
            run,
            image,
            folder=job.folder,
            embed_settings=embed_settings,
            prompt=job.prompts[n],
            negative_prompt=job.negative_prompt if guided else "",
            seed=one,
            num_inference_steps=job.num_inference_steps,
            guidance_scale=job.guidance_scale,
            height=job.height,
            width=job.width,
            stages={"encode": embeds[n], "denoise": latents[k], "decode": image},
        )
        for k, ((n, one), image) in enumerate(zip(jobs, images, strict=True))
    ]
    list_pictures(pictures)
    return pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The arguments of one run, checked, with every default filled in."""

    prompts: list[str]
    negative_prompt: str
    seeds: list[int]
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    model: ModelDirectory
    model_name: str
    dtype: str
    device: str
    offload: OffloadChoice
    folder: Path
    warnings: tuple[str, ...]


def check(
    *,
    prompt: str | list[str],
    negative_prompt: str,
    seed: int | str,
    num_images: int,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    max_sequence_length: int,
    model: str,
    dtype: str,
    device: str,
    offload: OffloadPreset | None = None,
    device_budget: str | int | None = None,
    host_budget: str | int | None = None,
    output: str,
) -> Job:
    """Check every argument, against the model's own configuration where it decides.

    Raises:
        RequestError: An argument cannot be used; the message says what can.
        ModelError: The model directory is not whole.

    Loads no model and starts no process.
    """
    opened = open_model(resolve_model(model))
    settings = RunSettings.from_env()
    ArtifactStore(settings.store_url).check_writable()
    own = model_settings(opened.directory)
    vae, transformer = (opened.components[name].config() for name in ("vae", "transformer"))
    trained_at = int(vae["sample_size"])  # pixels of a side
    height, width = rules.check_size(
        trained_at if height is None else height,
        trained_at if width is None else width,
        rules.spatial_multiple(vae, transformer),
    )
    if num_inference_steps is None:
        num_inference_steps = own.get("num_inference_steps", DEFAULT_STEPS)
    if guidance_scale is None:
        guidance_scale = own.get("guidance_scale", DEFAULT_GUIDANCE)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    device = settings.device if device == "auto" else rules.check_device_name(device)
    idle = without_effect(device, offload, device_budget, host_budget)
    return Job(
        prompts=rules.check_prompts(prompts, negative_prompt),
        negative_prompt=rules.check_prompt(negative_prompt, "negative_prompt"),
        seeds=rules.expand_seeds(rules.check_seed(seed), num_images),
        height=height,
        width=width,
        num_inference_steps=rules.check_steps(num_inference_steps),
        guidance_scale=rules.check_guidance(guidance_scale),
        max_sequence_length=rules.check_token_limit(max_sequence_length, MAX_SEQUENCE_LENGTH),
        model=opened,
        model_name=model if model == "miniature" else opened.directory.name,
        dtype=rules.check_dtype(dtype, opened.components["transformer"].file_dtype),
        device=device,
        offload=choose_offload(offload, device_budget, host_budget),
        folder=check_output_folder(output),
        warnings=(*opened.warnings, *([idle] if idle else [])),
    )

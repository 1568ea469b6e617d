"""What every flow to pictures does: its checks, its run, its phases after encode.

The flow itself, with its defaults and its phases in reading order, stands in the family's file;
so does what only the family knows, such as how it encodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect.runtime import flow_run
from pydantic import JsonValue

from flows.batch.scope import remembered
from flows.cli_arguments import argument_texts
from flows.from_frames import TEXT_TO_VIDEO
from flows.from_pictures import (
    TEXT_TO_IMAGE,
    Start,
    check_start,
    overlay,
    size_warning,
    strength_warning,
)
from flows.model_settings import model_settings
from flows.pictures import Picture, list_pictures, save_picture
from flows.run import Run, open_run
from flows.settings import RunSettings
from stages import rules
from stages.artifacts import ArtifactStore
from stages.block_inputs import parse_block_inputs
from stages.block_locks import chosen_blocks
from stages.component_sources import choose_sources
from stages.contracts import OffloadChoice, OffloadPreset, StageResult
from stages.families import Family, family_named, require_model_of
from stages.lora_files import Lora, choose_loras, target_warnings
from stages.media import check_output_folder
from stages.models import MINIATURE, ModelDirectory, open_model, resolve_model
from stages.offload_rules import choose_offload, without_effect
from stages.quantized import require_device_of
from stages.saving import SaveAs, choose_saving
from stages.size_rules import trained_edge

P = ParamSpec("P")
R = TypeVar("R")

LONGEST_LABEL = 60  # characters

Source = str | list[str] | None
"""What comes from elsewhere than the model: see `stages.component_sources`."""

ARGUMENTS = {
    "prompt": "What to paint; several prompts make several pictures.",
    "negative_prompt": "What to keep away from; takes a guidance scale over 1.",
    "image": "A picture to start from: a path, or where EXEUNT_ALLOW_URLS=1 is set a web address.",
    "mask_image": "Where the picture is painted anew: a mask of its size, white is painted, black "
    "is kept; or the word alpha for its transparent part.",
    "padding_mask_crop": "Paint only around the mask, enlarged: pixels to leave about it; the rest "
    "of the picture stays as it is, and so does its size.",
    "strength": "How much of the picture is painted anew, over 0 to 1; by default 0.6, with a mask "
    "1.",
    "seed": "0 to 2**64 - 1, or -1 to draw one; the n-th image of a prompt takes seed + n.",
    "num_images": "Images per prompt.",
    "height": "Pixels; by default that of the picture, or what the model was trained for.",
    "width": "Pixels; by default that of the picture, or what the model was trained for.",
    "num_inference_steps": "Denoising steps; by default what the model recommends.",
    "guidance_scale": "Weight of the prompt against the negative prompt; 1 or less is off.",
    "max_sequence_length": "Tokens of the prompt that are read.",
    "model": "A model directory in diffusers layout, or the hub id of one in the cache.",
    "component": "A component from elsewhere, as NAME=SOURCE: a folder, a single .safetensors or "
    ".gguf file, or a hub id in the cache, such as transformer=flux-Q8_0.gguf.",
    "lora": "A LoRA file that the model wears: PATH, PATH:SCALE, or COMPONENT=PATH:SCALE where a "
    "model has two transformers; several are added in their order.",
    "blocks": "A folder of custom blocks that was reviewed with `exeunt blocks review`: FOLDER for "
    "all blocks of the pipeline, or NAME=FOLDER for one, such as denoise.denoise=FOLDER.",
    "block_input": "An input of custom blocks that has no argument of its own, as NAME=VALUE.",
    "dtype": "float32, bfloat16, float16, or auto for that of the model's files.",
    "device": "cpu, cuda, cuda:N, or auto.",
    "offload": "How weights share a GPU with the work; by default DDO_PRESET, else auto, which "
    "streams a model's weights only if they do not fit.",
    "device_budget": "Device memory for weights and work, such as 12GiB; by default what is free.",
    "host_budget": "Host memory that may be pinned, such as 8GiB; by default three fifths of "
    "what is available.",
    "vae_tiling": "Decode in tiles, which takes less memory and changes pixels a little; auto "
    "does so only when memory runs out.",
    "output": "Folder for the pictures.",
    "format": "Of the files: png keeps every pixel, jpeg and webp are smaller.",
    "quality": "Of a jpeg or a webp, 1 to 100; by default 90.",
    "label": "iptc marks each file as made by a model, in a way that picture programs and websites "
    "read; by default none is marked.",
    "embed_settings": "Write the settings into each picture.",
    "on_truncate": "warn or error when a prompt is longer than the text encoder reads.",
    "fresh": "Compute everything anew, even what is already there.",
}
"""The arguments that mean the same in every family."""


def documented(
    function: Callable[P, R], arguments: Mapping[str, str] = ARGUMENTS
) -> Callable[P, R]:
    """Complete a flow's docstring by the arguments that it leaves to `arguments`.

    Prefect's pages and the command line both read it.
    """
    own = argument_texts(function)
    lines = (inspect.getdoc(function) or "").partition("Args:")[0].rstrip().splitlines()
    texts = [
        f"    {name}: {own.get(name) or arguments[name]}"
        for name in inspect.signature(function).parameters
    ]
    function.__doc__ = "\n".join([*lines, "", "Args:", *texts])
    return function


def run_name(family: str) -> Callable[[], str]:
    """Names a flow run after its family and its first prompt."""

    def named() -> str:
        prompt = flow_run.parameters.get("prompt") or ""
        return f"{family} {short(prompt if isinstance(prompt, str) else str(prompt[0]))}"

    return named


def short(prompt: str) -> str:
    """A prompt for names, logs and displays: one line, no control characters."""
    line = rules.escape_for_terminal(prompt)
    return line if len(line) <= LONGEST_LABEL else f"{line[: LONGEST_LABEL - 1]}…"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The arguments of one run, checked, with every default filled in.

    Attributes:
        negative_prompt: None leaves it to the family what no negative prompt means.
        guidance_scale: None where the model takes none.
        max_sequence_length: None where the family has no such option.
        start: What it starts from: the task, and the pictures that were given.
        loras: What its models wear, in order.
        blocks: Digest of reviewed custom blocks, by the name of the block in whose place they run.
        block_inputs: What they are given besides, by name.
        save_as: How its files are written.
    """

    family: Family
    prompts: list[str]
    negative_prompt: str | None
    seeds: list[int]
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float | None
    max_sequence_length: int | None
    model: ModelDirectory
    model_name: str
    dtype: str
    device: str
    offload: OffloadChoice
    folder: Path
    warnings: tuple[str, ...]
    start: Start = field(default_factory=Start)
    loras: tuple[Lora, ...] = ()
    blocks: Mapping[str, str] = field(default_factory=dict)
    block_inputs: Mapping[str, JsonValue] = field(default_factory=dict)
    save_as: SaveAs = field(default_factory=SaveAs)

    @property
    def media(self) -> Mapping[str, Any]:
        """The pictures that were given, by the pipeline's names of its arguments."""
        return self.start.media

    @property
    def is_guided(self) -> bool:
        """Whether the denoiser is asked twice a step, with and without the prompt."""
        return bool(self.family.guidance) and (self.guidance_scale or 0) > 1

    @property
    def pictures(self) -> list[tuple[int, int]]:
        """Each picture's prompt, by its place, and its seed."""
        return [(n, seed) for n in range(len(self.prompts)) for seed in self.seeds]

    def label(self, n: int, seed: int) -> str:
        """A picture for people."""
        return f"seed {seed}, {short(self.prompts[n])}"


def open_sources(model: str, component: Source) -> ModelDirectory:
    """The checked model, with what of its components comes from elsewhere."""
    return open_model(resolve_model(model), sources=choose_sources(component))


def open_for(family: str, model: str, component: Source = None) -> ModelDirectory:
    """The checked model directory, of this family.

    Args:
        component: As for `stages.component_sources.choose_sources`.

    Raises:
        ModelError: It is not whole, or belongs to another family.
    """

    def opened() -> ModelDirectory:
        found = open_sources(model, component)
        require_model_of(family_named(family), found.class_name, str(found.directory))
        return found

    return remembered(f"model {family} {model} {component}", opened)


def check_job(
    family: str,
    opened: ModelDirectory,
    *,
    prompt: str | list[str],
    negative_prompt: str | None = None,
    image: str | list[str] | None = None,
    mask_image: str | None = None,
    padding_mask_crop: int | None = None,
    strength: float | None = None,
    start: Start | None = None,
    like: Callable[[int, int], tuple[int, int]] | None = None,
    seed: int | str = -1,
    num_images: int = 1,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    default_steps: int,
    guidance_scale: float | None = None,
    default_guidance: float | None,
    max_sequence_length: int | None = None,
    lora: str | Sequence[str] | None = None,
    blocks: str | Sequence[str] | None = None,
    block_input: str | Sequence[str] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    offload: OffloadPreset | None = None,
    device_budget: str | int | None = None,
    host_budget: str | int | None = None,
    output: str = "pictures",
    format: str = "png",
    quality: int | None = None,
    label: str | None = None,
) -> Job:
    """Check every argument, against the model's own configuration where it decides.

    Args:
        start: What it starts from, where that was read already.
        like: Height and width for a picture of some width and height, where the model was taught
            other sizes than that of the picture.
        default_steps: Steps where neither the caller nor the model says how many.
        default_guidance: The same for the guidance scale; None where the model takes none.

    Raises:
        RequestError: An argument cannot be used; the message says what can.

    Loads no model and starts no process.
    """
    declared = family_named(family)
    settings = RunSettings.from_env()
    ArtifactStore(settings.store_url).check_writable()
    own = model_settings(opened.directory)
    loras = choose_loras(lora)
    reviewed = chosen_blocks(settings.home.root, _several(blocks))
    block_inputs = parse_block_inputs(_several(block_input), reviewed)
    configs = {name: opened.components[name].config() for name in ("vae", declared.denoiser)}
    vae, denoiser = configs["vae"], configs[declared.denoiser]
    start = start or check_start(
        declared,
        image=image,
        mask_image=mask_image,
        padding_mask_crop=padding_mask_crop,
        strength=strength,
        allow_urls=settings.allow_urls,
    )
    trained_at = trained_edge(vae, configs[declared.sized_by], declared.edge)
    multiple = rules.spatial_multiple(vae, denoiser)
    asked = height is not None and width is not None
    if start.size is not None and like is not None and height is None and width is None:
        height, width = like(*start.size)
    elif start.size is not None:
        rules.check_edges(height, width, multiple)
        height, width = rules.size_like(
            start.size,
            multiple,
            trained_at,
            height=height,
            width=width,
            fills=start.is_cropped,
        )
    height, width = rules.check_size(
        trained_at if height is None else height,
        trained_at if width is None else width,
        multiple,
    )
    resized = size_warning(start, height, width, is_asked=asked)
    if num_inference_steps is None:
        num_inference_steps = own.get("num_inference_steps", default_steps)
    rules.check_steps(num_inference_steps, start.strength)
    drowned = strength_warning(start, declared, num_inference_steps)
    device = settings.device if device == "auto" else rules.check_device_name(device)
    require_device_of(opened, device)
    file_dtype = opened.components[declared.denoiser].file_dtype
    dtype = rules.check_dtype(dtype, file_dtype)
    told = [
        rules.narrowing_warning(dtype, file_dtype),
        without_effect(device, offload, device_budget, host_budget),
    ]
    if guidance_scale is None:
        guidance_scale = own.get("guidance_scale", default_guidance)
    elif default_guidance is None:
        told.append(f"guidance_scale has no effect: {opened.directory.name} takes none")
    if guidance_scale is not None:
        guidance_scale = rules.check_guidance(guidance_scale)
    if default_guidance is None:
        guidance_scale = None
    if max_sequence_length is not None:
        max_sequence_length = rules.check_token_limit(max_sequence_length, declared.max_tokens)
    if negative_prompt is not None:
        negative_prompt = rules.check_prompt(negative_prompt, "negative_prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    prompts = rules.check_prompts(prompts, negative_prompt or "")
    save_as = choose_saving(
        format=format,
        quality=quality,
        label=label,
        size=start.size if start.is_cropped and start.size else (width, height),
        prompts=[text + (negative_prompt or "") for text in prompts],
        is_from_prompt=start.task in (TEXT_TO_IMAGE, TEXT_TO_VIDEO),
    )
    return Job(
        family=declared,
        prompts=prompts,
        negative_prompt=negative_prompt,
        seeds=rules.expand_seeds(rules.check_seed(seed), num_images),
        height=height,
        width=width,
        num_inference_steps=rules.check_steps(num_inference_steps),
        guidance_scale=guidance_scale,
        max_sequence_length=max_sequence_length,
        model=opened,
        model_name="miniature" if opened.directory == MINIATURE else opened.directory.name,
        dtype=dtype,
        device=device,
        offload=choose_offload(offload, device_budget, host_budget),
        folder=check_output_folder(output),
        warnings=(
            *opened.warnings,
            *target_warnings(loras, opened),
            *start.warnings,
            *resized,
            *drowned,
            *(text for text in told if text),
        ),
        start=start,
        loras=loras,
        blocks=reviewed,
        block_inputs=block_inputs,
        save_as=save_as,
    )


def _several(texts: str | Sequence[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())


def begin(job: Job, *, vae_tiling: str, on_truncate: str, fresh: bool) -> Run:
    """A run of a checked job; tells what of the arguments has no effect."""
    run = open_run(
        family=job.family.name,
        task=job.start.task,
        model=job.model,
        model_name=job.model_name,
        dtype=job.dtype,
        device=job.device,
        fresh=fresh,
        on_truncate=on_truncate,
        offload=job.offload,
        loras=job.loras,
        blocks=job.blocks,
        block_inputs=job.block_inputs,
        may_tile=vae_tiling != "off",
        run_id=flow_run.id or "",
    )
    for warning in job.warnings:
        run.display.warn(warning)
    if job.negative_prompt and not job.is_guided:
        run.display.warn(
            f"negative_prompt has no effect at guidance_scale {job.guidance_scale:g}; set it over 1"
        )
    return run


def denoise_pictures(
    run: Run,
    job: Job,
    embeds: Sequence[StageResult],
    conditions: Sequence[tuple[StageResult, ...]] = (),
    **options: int | None,
) -> list[StageResult]:
    """The denoise phase: latents of every picture.

    Args:
        embeds: One per prompt.
        conditions: What else each picture starts from, one tuple per picture; none for none.
        options: What only this family's pipeline takes.
    """
    sizes = {"height": job.height, "width": job.width}
    taken = run.manifest.phases["denoise"].options  # SDXL goes by the picture that it starts from
    options |= {name: edge for name, edge in sizes.items() if name in taken}
    with run.phase("denoise", len(job.pictures)) as denoise:
        return [
            denoise(
                embeds[n],
                *(conditions[k] if conditions else ()),
                label=job.label(n, seed),
                seed=seed,
                num_inference_steps=job.num_inference_steps,
                guidance_scale=job.guidance_scale,
                strength=job.start.strength,
                **options,
            )
            for k, (n, seed) in enumerate(job.pictures)
        ]


def decode_pictures(
    run: Run, job: Job, latents: Sequence[StageResult], *, vae_tiling: str
) -> list[StageResult]:
    """The decode phase: pixels of every picture.

    Args:
        latents: One per picture.
    """
    inputs, options = overlay(run, job)
    with run.phase("decode", len(job.pictures)) as decode:
        return [
            decode(
                latents[k],
                *inputs,
                label=job.label(n, seed),
                tiling=True if vae_tiling == "on" else None,
                **options,
            )
            for k, (n, seed) in enumerate(job.pictures)
        ]


def save_pictures(
    run: Run,
    job: Job,
    embeds: Sequence[StageResult],
    latents: Sequence[StageResult],
    images: Sequence[StageResult],
    *,
    conditions: Sequence[tuple[StageResult, ...]] = (),
    embed_settings: bool,
) -> list[Picture]:
    """Save what a run has painted, and list it on the run's page.

    Args:
        embeds: One per prompt.
        latents: One per picture.
        images: One per picture.
        conditions: As for `denoise_pictures`.
    """
    width, height = (job.start.is_cropped and job.start.size) or (job.width, job.height)
    pictures = [
        save_picture(
            run,
            image,
            folder=job.folder,
            save_as=job.save_as,
            embed_settings=embed_settings,
            prompt=job.prompts[n],
            negative_prompt=(job.negative_prompt or "") if job.is_guided else "",
            seed=seed,
            num_inference_steps=job.num_inference_steps,
            guidance_scale=1.0 if job.guidance_scale is None else job.guidance_scale,
            height=height,
            width=width,
            strength=job.start.strength,
            stages={
                "encode": embeds[n],
                **{each.stage: each for each in (conditions[k] if conditions else ())},
                "denoise": latents[k],
                "decode": image,
            },
        )
        for k, ((n, seed), image) in enumerate(zip(job.pictures, images, strict=True))
    ]
    list_pictures(pictures)
    return pictures

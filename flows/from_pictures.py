"""Runs that start from pictures: which task it is, what is read, the condition phase.

The task follows from the arguments: nothing but a prompt paints from noise, an `image` starts
from it or edits it, as the family does, and a `mask_image` repaints what is white in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages import rules
from stages.contracts import StageResult
from stages.errors import RequestError
from stages.families import Family

if TYPE_CHECKING:  # a run from a prompt alone imports no picture library
    from flows.run import Run
    from flows.text_to_image import Job
    from stages.image_inputs import InputPicture

TEXT_TO_IMAGE, IMAGE_TO_IMAGE, INPAINT, EDIT = (
    *("text-to-image", "image-to-image"),
    *("inpaint", "edit"),
)
STRENGTH = {IMAGE_TO_IMAGE: 0.6, INPAINT: 1.0}
"""Share of the noise that is laid over the picture, where the user does not say."""

STRETCH_TOLERANCE = 0.05  # of the aspect ratio

REFERENCES_LIMIT = 8  # as many pictures as any model here was taught to look at, and more


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run starts from.

    Attributes:
        task: The family's task.
        media: Pictures by the pipeline's names of its arguments.
        size: Width and height of the first picture in pixels; None without one.
        strength: 0 to 1; None where the task takes none.
        padding_mask_crop: Pixels about the mask that are painted with it, the rest being cut off
            and laid around again; None paints the whole picture.
        warnings: What of the files is not used or not exact.
    """

    task: str = TEXT_TO_IMAGE
    media: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    strength: float | None = None
    padding_mask_crop: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_cropped(self) -> bool:
        """Whether the part around the mask is painted alone."""
        return self.padding_mask_crop is not None


def check_start(
    family: Family,
    *,
    image: str | list[str] | None,
    mask_image: str | None,
    strength: float | None,
    allow_urls: bool,
    padding_mask_crop: int | None = None,
) -> Start:
    """Read the pictures that a run starts from, and tell its task by them.

    Raises:
        RequestError: A picture cannot be used, an argument lacks another one that it needs, or
            the family has no such task.
    """
    sources = [] if image is None else [image] if isinstance(image, str) else image
    if image is not None and not 1 <= len(sources) <= REFERENCES_LIMIT:
        raise RequestError(f"image holds {len(sources)} pictures, allowed are 1 to 8")
    if padding_mask_crop is not None:
        rules.check_padding(padding_mask_crop)
        if mask_image is None:
            raise RequestError("padding_mask_crop belongs to a mask; give mask_image, too")
    task = _task(family, bool(sources), mask_image is not None, strength is not None)
    if not sources:
        return Start(task=task)
    from stages.image_inputs import read_mask, read_picture

    read = [read_picture(each, allow_urls=allow_urls) for each in sources]
    media: dict[str, Any] = {"image": [each.pixels for each in read]}
    if len(read) == 1:
        media["image"] = read[0].pixels
    elif task != EDIT:
        raise RequestError(
            f"image holds {len(read)} pictures, but {task} of {family.name} starts from one; run "
            "it once for each"
        )
    if mask_image is not None:
        read.append(read_mask(mask_image, read[0], allow_urls=allow_urls))
        media["mask_image"] = read[-1].pixels
    if task in STRENGTH:
        strength = rules.check_strength(STRENGTH[task] if strength is None else strength)
    return Start(
        task=task,
        media=media,
        size=read[0].pixels.size,
        strength=strength,
        padding_mask_crop=padding_mask_crop,
        warnings=_warnings(read),
    )


def _warnings(read: Sequence[InputPicture]) -> tuple[str, ...]:
    return tuple(warning for each in read for warning in each.warnings)


def _task(family: Family, has_image: bool, has_mask: bool, has_strength: bool) -> str:
    if not has_image:
        if has_mask or has_strength:
            given = "mask_image" if has_mask else "strength"
            raise RequestError(f"{given} belongs to a picture; give image, too")
        if TEXT_TO_IMAGE not in family.tasks:
            raise RequestError(f"{family.name} edits a picture; give image")
        return TEXT_TO_IMAGE
    wanted = (INPAINT,) if has_mask else (IMAGE_TO_IMAGE, EDIT)
    for task in wanted:
        if task in family.tasks:
            return task
    raise RequestError(
        f"{family.name} has no task {wanted[0]}; its tasks are {', '.join(family.tasks)}"
    )


def check_references(
    start: Start, *, most: int, least_edge: int = 1, most_aspect: float | None = None
) -> None:
    """Hold pictures that are looked at to what a pipeline takes.

    Args:
        most: Number of pictures.
        least_edge: Pixels of the shorter edge.
        most_aspect: Longer edge over shorter one; None for any.

    Raises:
        RequestError: With the number or the size of the one that does not fit.
    """
    pictures = start.media.get("image", [])
    pictures = pictures if isinstance(pictures, list) else [pictures]
    if len(pictures) > most:
        raise RequestError(
            f"image holds {len(pictures)} pictures, allowed are {most} with this model"
        )
    for n, (width, height) in enumerate(each.size for each in pictures):
        which = "image" if len(pictures) == 1 else f"image {n + 1} of {len(pictures)}"
        found = f"{which} is {width} x {height} pixels"
        if min(width, height) < least_edge:
            raise RequestError(f"{found}, allowed are edges of {least_edge} and more; enlarge it")
        if most_aspect is not None and max(width, height) > most_aspect * min(width, height):
            raise RequestError(
                f"{found}, allowed are {most_aspect:g} times as wide as high, or as high as wide; "
                "crop it"
            )


def strength_warning(start: Start, family: Family, num_inference_steps: int) -> tuple[str, ...]:
    """Says if all of a picture drowns in noise; flow matching begins with nothing else.

    A UNet's schedule begins with a little of the picture left.
    """
    if start.task != IMAGE_TO_IMAGE or start.strength is None or family.denoiser == "unet":
        return ()
    if int(num_inference_steps - num_inference_steps * start.strength) > 0:
        return ()
    return (
        f"strength {start.strength:g} of {num_inference_steps} steps starts from noise alone: "
        "image has no effect; lower strength or take more steps",
    )


def size_warning(start: Start, height: int, width: int, *, is_asked: bool) -> tuple[str, ...]:
    """What of a picture's form is lost at the size that is painted; nothing if nothing is."""
    if start.size is None or start.task == EDIT or start.is_cropped:
        return ()
    from_width, from_height = start.size
    size, painted = f"{from_width} x {from_height}", f"{width} x {height}"
    if is_asked and abs(width * from_height / (height * from_width) - 1) > STRETCH_TOLERANCE:
        return (f"image is {size} pixels and is stretched to {painted}; give one edge alone",)
    if not is_asked and width * height * 2 <= from_width * from_height:
        return (f"image is {size} pixels and is painted at {painted}; height sets another size",)
    return ()


# ---- phases --------------------------------------------------------------------------------


def given(run: Run, job: Job, stage: str) -> StageResult:
    """The run's pictures that a phase takes, in the store; none for a run from a prompt."""
    from stages.media_inputs import put_media

    taken = run.manifest.phases[stage].options
    return put_media(run.store, {name: each for name, each in job.media.items() if name in taken})


def condition_pictures(
    run: Run, job: Job, embeds: Sequence[StageResult]
) -> list[tuple[StageResult, ...]]:
    """The condition phase: what the denoiser starts from, for each picture to be painted.

    Args:
        embeds: One per prompt.
    """
    return condition(
        run,
        job,
        embeds,
        height=job.height,
        width=job.width,
        padding_mask_crop=job.start.padding_mask_crop,
    )


def condition(
    run: Run, job: Job, embeds: Sequence[StageResult], **options: Any
) -> list[tuple[StageResult, ...]]:
    """The condition phase of pictures and of videos; empty for a run from a prompt.

    A family that draws here encodes what was given once a seed, any other once. It is encoded
    once a prompt only if its blocks look at the prompt, too.

    Args:
        embeds: One per prompt.
        options: Of these, those that the phase's blocks take.
    """
    if not job.media:
        return [() for _ in job.pictures]
    facts = run.manifest.phases["condition"]
    draws, reads_prompt = "condition" in job.family.drawing, bool(facts.inputs)
    taken = {name: value for name, value in options.items() if name in facts.options}
    media = given(run, job, "condition")
    keys = [(n if reads_prompt else 0, seed if draws else None) for n, seed in job.pictures]
    with run.phase("condition", len(set(keys))) as phase:
        made = {
            (n, seed): phase(
                media,
                *([embeds[n]] if reads_prompt else []),
                label="picture" if seed is None else f"picture, seed {seed}",
                seed=seed,
                **taken,
            )
            for n, seed in dict.fromkeys(keys)
        }
    return [(made[key],) for key in keys]


def overlay(run: Run, job: Job) -> tuple[list[StageResult], dict[str, int]]:
    """What decode takes besides latents: of a picture that is painted in part, the whole of it."""
    padding = job.start.padding_mask_crop
    if padding is None or "padding_mask_crop" not in run.manifest.phases["decode"].options:
        return [], {}
    return [given(run, job, "decode")], {"padding_mask_crop": padding}

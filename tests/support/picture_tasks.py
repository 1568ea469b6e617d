"""Each family's tasks that start from a picture, with a job that it is tried with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stages.artifacts import ArtifactStore
from stages.contracts import StageContext, StageRequest, StageResult
from stages.media_inputs import put_media
from stages.phases import Graph, split
from tests.support import tiny_editors
from tests.support.chain import request, run_stage
from tests.support.tiny_families import CASES, Case


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """Coloured noise."""
    levels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def mask(edge: int = 64) -> Image.Image:
    """White in the middle."""
    levels = np.zeros((edge, edge), np.uint8)
    levels[edge // 4 : edge * 3 // 4, edge // 4 : edge * 3 // 4] = 255
    return Image.fromarray(levels)


STARTING: dict[str, Any] = {"num_inference_steps": 4, "strength": 0.6}
"""Two or three steps of four: with all of them most families start from noise alone."""


@dataclass(frozen=True, kw_only=True)
class PictureTask:
    """A task of a family's case.

    Attributes:
        media: The arguments that are pictures.
        options: The pipeline's own arguments that only this task takes.
        draws: Whether the picture is encoded under a seed.
        shares_text: Whether an encoded prompt serves every picture.
        variant: Tells two jobs of one task apart.
    """

    case: Case
    name: str
    variant: str = ""
    media: dict[str, Any] = field(default_factory=lambda: {"image": picture(1)})
    options: dict[str, Any] = field(default_factory=lambda: dict(STARTING))
    draws: bool = True
    shares_text: bool = True

    @property
    def id(self) -> str:
        return f"{self.case.name} {self.name} {self.variant}".rstrip()

    @property
    def graph(self) -> Graph:
        return split(self.case.family, self.name)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the unsplit pipeline, less those of its guiders."""
        own = {key: value for each in self.case.options.values() for key, value in each.items()}
        return {**own, **self.options, **self.media}

    def stage(
        self, where: StageContext, name: str, *inputs: StageResult, **changes: Any
    ) -> StageResult:
        """Run one stage in this process."""
        return run_stage(self.request(where, name, *inputs, **changes), where)[0]

    def request(
        self, where: StageContext, name: str, *inputs: StageResult, **changes: Any
    ) -> StageRequest:
        """The request of one stage, with the media and options that it takes."""
        taken = self.graph.input_names(name)
        media = changes.pop("media", self.media)
        given = {key: value for key, value in media.items() if key in taken}
        options = {
            key: value
            for key, value in self.arguments.items()
            if key in taken and key not in self.media
        }
        pipeline_own = self.case.options.get(name, {})
        asked = self.case.requests.get(name, {})
        options |= {key: value for key, value in asked.items() if key not in pipeline_own}
        options |= changes.pop("options", {})
        if name == "denoise" or (name == "condition" and self.draws):
            changes.setdefault("seed", 7)
        pictures = put_media(ArtifactStore(where.store_url), given)
        changes = {"family": self.case.name, "task": self.name, **changes}
        return request(name, options, pictures, *inputs, **changes)


CROPPED: dict[str, Any] = {
    "variant": "cropped",
    "media": {"image": picture(1, 128, 128), "mask_image": mask(128)},
    "options": {**STARTING, "padding_mask_crop": 8},
}
MASKED: dict[str, Any] = {"image": picture(1), "mask_image": mask()}
EDITOR = replace(
    CASES["qwen-image"],
    name="qwen-image-edit",
    build=tiny_editors.qwen_image_edit,
    text={"negative_prompt": "blurry"},
)
EDITOR_PLUS = replace(
    EDITOR,
    name="qwen-image-edit-plus",
    command="qwen-image-edit",
    build=partial(tiny_editors.qwen_image_edit, pipeline="QwenImageEditPlusPipeline"),
)
KONTEXT = replace(CASES["flux"], name="flux-kontext", build=tiny_editors.flux_kontext)

TASKS = {
    task.id: task
    for task in (
        PictureTask(case=CASES["z-image"], name="image-to-image"),
        PictureTask(case=CASES["sdxl"], name="image-to-image"),
        PictureTask(case=CASES["sdxl"], name="inpaint", media=MASKED, options=STARTING),
        PictureTask(case=CASES["sd3"], name="image-to-image"),
        PictureTask(case=CASES["flux"], name="image-to-image"),
        PictureTask(
            case=KONTEXT,
            name="edit",
            options={"_auto_resize": False, "max_area": 64 * 64},
            draws=False,
        ),
        PictureTask(case=CASES["qwen-image"], name="image-to-image", draws=False),
        PictureTask(
            case=CASES["qwen-image"],
            name="inpaint",
            media=MASKED,
            options=STARTING,
            draws=False,
        ),
        PictureTask(case=CASES["sdxl"], name="inpaint", **CROPPED),
        PictureTask(case=CASES["qwen-image"], name="inpaint", draws=False, **CROPPED),
        PictureTask(case=EDITOR, name="edit", options={}, draws=False, shares_text=False),
        PictureTask(
            case=EDITOR_PLUS,
            name="edit",
            media={"image": [picture(1), picture(2, 64, 96)]},
            options={},
            draws=False,
            shares_text=False,
        ),
        PictureTask(case=CASES["flux2-klein"], name="edit", options={}, draws=False),
        PictureTask(
            case=CASES["flux2-klein-base"],
            name="edit",
            media={"image": [picture(1), picture(2, 64, 96)]},
            options={},
            draws=False,
        ),
    )
}


def chain(
    task: PictureTask, where: StageContext, *, seed: int = 7, dtype: str = "float32"
) -> tuple[StageResult, StageResult]:
    """The latents and the picture of a whole chain of stages."""
    embeds = task.stage(where, "encode", dtype=dtype)
    drawn = {"seed": seed} if task.draws else {}
    condition = task.stage(where, "condition", dtype=dtype, **drawn)
    latents = task.stage(where, "denoise", embeds, condition, seed=seed, dtype=dtype)
    return latents, task.stage(where, "decode", latents, dtype=dtype)


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    """Write a picture to a file, and return its path."""
    image.save(path, **options)
    return path

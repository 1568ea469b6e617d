"""Videos that start from pictures: which task it is, what is read, the condition phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flows.from_pictures import Start, condition
from stages import rules
from stages.contracts import StageResult
from stages.errors import DependencyError, RequestError
from stages.families import Family
from stages.models import ModelDirectory

if TYPE_CHECKING:  # a run from a prompt alone imports no picture library
    from flows.run import Run
    from flows.text_to_video import VideoJob
    from stages.image_inputs import InputPicture

TEXT_TO_VIDEO, IMAGE_TO_VIDEO, FIRST_AND_LAST_FRAME = (
    *("text-to-video", "image-to-video"),
    "first-and-last-frame",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """The pictures that a video starts from, read.

    Attributes:
        task: The family's task.
        read: By the pipeline's names of its arguments.
    """

    task: str = TEXT_TO_VIDEO
    read: Mapping[str, InputPicture] = field(default_factory=dict)

    def size_like(
        self,
        family: Family,
        opened: ModelDirectory,
        height: int | None,
        width: int | None,
        default: tuple[int, int],
    ) -> tuple[int, int]:
        """Height and width: as given, else as many pixels as the default in the first's form."""
        if "image" not in self.read:
            return height or default[0], width or default[1]
        configs = (opened.components[name].config() for name in ("vae", family.denoiser))
        multiple = rules.spatial_multiple(*configs)
        rules.check_edges(height, width, multiple)
        edge = math.isqrt(default[0] * default[1])
        picture = self.read["image"].pixels
        return rules.size_like(picture.size, multiple, edge, height=height, width=width, fills=True)

    def start(self, height: int, width: int) -> Start:
        """What the run starts from: each picture at the size of the video."""
        if not self.read:
            return Start(task=self.task)
        from stages.framing import cut_sentence, framed

        told = [warning for each in self.read.values() for warning in each.warnings]
        for name, each in self.read.items():
            if sentence := cut_sentence(name, each.pixels, height, width):
                told.append(sentence)
        media = {name: framed(each.pixels, height, width) for name, each in self.read.items()}
        return Start(task=self.task, media=media, warnings=tuple(told))


def read_frames(
    family: Family,
    *,
    image: str | None,
    last_image: str | None = None,
    allow_urls: bool,
) -> Frames:
    """Read the pictures that a video starts from, and tell its task by them.

    Raises:
        RequestError: A picture cannot be used, or this model makes no such videos.
        DependencyError: The task takes a library that is not installed.
    """
    if last_image is not None and image is None:
        raise RequestError("last_image belongs to a first one; give image, too")
    task = TEXT_TO_VIDEO if image is None else IMAGE_TO_VIDEO
    if last_image is not None:
        task = FIRST_AND_LAST_FRAME
    if task not in family.tasks:
        raise RequestError(_refusal(family, task))
    if task == FIRST_AND_LAST_FRAME and find_spec("torchvision") is None:
        raise DependencyError(
            f"{task} of {family.name} takes torchvision, which cuts the last picture in diffusers; "
            "install the torchvision of this torch"
        )
    if image is None:
        return Frames(task=task)
    from stages.image_inputs import read_picture

    sources = {"image": image, "last_image": last_image}
    return Frames(
        task=task,
        read={
            name: read_picture(source, name=name, allow_urls=allow_urls)
            for name, source in sources.items()
            if source is not None
        },
    )


def _refusal(family: Family, task: str) -> str:
    if task == TEXT_TO_VIDEO:
        return f"this {family.name} model starts from a picture; give image"
    given = "image" if task == IMAGE_TO_VIDEO else "last_image"
    return (
        f"{given} has no use: this {family.name} model has no task {task}; its tasks are "
        f"{', '.join(family.tasks)}"
    )


def condition_videos(
    run: Run, job: VideoJob, embeds: Sequence[StageResult], **options: Any
) -> list[tuple[StageResult, ...]]:
    """The condition phase: what the denoiser starts from, for each video.

    Args:
        embeds: One per prompt.
        options: What only this family's pipeline takes.
    """
    return condition(run, job, embeds, **job.lengths, **options)

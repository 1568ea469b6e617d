"""Videos that are made along another one: what is read, and how long and large that makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.from_pictures import Start
from stages import rules
from stages.errors import RequestError
from stages.families import Family
from stages.models import ModelDirectory
from stages.size_rules import check_num_frames, temporal_multiple

if TYPE_CHECKING:
    from PIL import Image

    from stages.video_inputs import InputVideo

TASK = "video-conditioning"
MOST_REFERENCES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """What a video is made along, read and brought to its size.

    Attributes:
        size: Height and width in pixels.
        num_frames: As many as are used of the video, or as the caller wants.
        frame_rate: Of the video; None without one.
        media: By the pipeline's names of its arguments.
    """

    size: tuple[int, int]
    num_frames: int
    frame_rate: float | None
    media: dict[str, Any]
    warnings: tuple[str, ...]
    task: str = TASK

    def size_like(self, *_: object) -> tuple[int, int]:
        """Height and width of the video."""
        return self.size

    def start(self, *_: object) -> Start:
        """What the run starts from."""
        return Start(task=self.task, media=self.media, warnings=self.warnings)


def read_control(
    family: Family,
    opened: ModelDirectory,
    *,
    video: str | None,
    mask_video: str | None,
    reference_images: Sequence[str],
    height: int | None,
    width: int | None,
    num_frames: int | None,
    default_size: tuple[int, int],
    default_frames: int,
    allow_urls: bool,
) -> Control:
    """Read a control video, its mask and reference pictures.

    Args:
        num_frames: None takes as many as the video has and the VAE can hold, at most
            `default_frames`.

    Raises:
        RequestError: One of them cannot be used, or they do not fit together.
    """
    from stages.image_inputs import read_picture
    from stages.video_inputs import read_video

    if mask_video is not None and video is None:
        raise RequestError("mask_video belongs to a video; give video, too")
    if video is None and not reference_images:
        raise RequestError(f"{family.name} follows a video or pictures; give video, or image")
    if len(reference_images) > MOST_REFERENCES:
        raise RequestError(
            f"image holds {len(reference_images)} pictures, allowed are {MOST_REFERENCES}"
        )
    configs = {name: opened.components[name].config() for name in ("vae", family.denoiser)}
    multiple = rules.spatial_multiple(configs["vae"], configs[family.denoiser])
    packed = temporal_multiple(configs["vae"])
    rules.check_edges(height, width, multiple)
    if num_frames is not None:
        check_num_frames(num_frames, packed)
    edge = math.isqrt(default_size[0] * default_size[1])

    def size_for(from_width: int, from_height: int) -> tuple[int, int]:
        picture = (from_width, from_height)
        return rules.size_like(picture, multiple, edge, height=height, width=width, fills=True)

    references = [read_picture(each, allow_urls=allow_urls) for each in reference_images]
    told = [warning for each in references for warning in each.warnings]
    media: dict[str, Any] = {}
    if references:
        media["reference_images"] = [each.pixels for each in references]
    if video is None:
        return Control(
            size=(height or default_size[0], width or default_size[1]),
            num_frames=num_frames or default_frames,
            frame_rate=None,
            media=media,
            warnings=tuple(told),
        )
    most = num_frames or default_frames
    control = read_video(video, most_frames=most, size_for=size_for, allow_urls=allow_urls)
    used = _num_used(control, num_frames, packed)
    media["video"] = control.frames[:used]
    told += control.warnings
    if control.has_more or used < len(control.frames):
        told.append(f"video goes on after {used} frames; the rest is not used")
    shape = media["video"][0].size
    if mask_video is not None:
        masks = read_video(
            mask_video,
            most_frames=used,
            size_for=lambda *_: (shape[1], shape[0]),
            name="mask_video",
            is_mask=True,
            allow_urls=allow_urls,
        )
        media["mask"] = _fitting(masks.frames, used)
        told += masks.warnings
    return Control(
        size=(shape[1], shape[0]),
        num_frames=used,
        frame_rate=control.frame_rate,
        media=media,
        warnings=tuple(told),
    )


def _num_used(control: InputVideo, num_frames: int | None, packed: int) -> int:
    found = len(control.frames)
    most = (found - 1) // packed * packed + 1
    if num_frames is not None and found < num_frames:
        raise RequestError(
            f"num_frames is {num_frames}, but video has {found} frames; use {most} or fewer"
        )
    return num_frames or most


def _fitting(masks: list[Image.Image], num_frames: int) -> list[Image.Image]:
    if len(masks) < num_frames:
        raise RequestError(
            f"mask_video has {len(masks)} frames, but {num_frames} of video are used; give a mask "
            f"for each, or set num_frames to fewer"
        )
    return masks

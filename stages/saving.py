"""How finished files are written: their format, its quality, and a label; loads no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from xml.sax.saxutils import escape

from stages.errors import RequestError
from stages.text_rules import shown

PictureFormat = Literal["png", "jpeg", "webp"]
Label = Literal["iptc"]

DEFAULT_QUALITY = 90
LONGEST_EDGE = {"jpeg": 65_500, "webp": 16_383}
"""Pixels; a PNG holds more than any machine paints."""

MAX_SEGMENT_NBYTES = 65_533
"""Of one segment of a JPEG: its settings have one, and the text for other tools another."""

MAX_JPEG_PROMPT_NBYTES = 56_000
"""What a prompt and its negative may take in a segment; the rest is for the other settings."""

_EXTENSIONS = {"png": ".png", "jpeg": ".jpg", "webp": ".webp", "mp4": ".mp4"}
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")

PAINTED, PAINTED_OVER = "trainedAlgorithmicMedia", "compositeWithTrainedAlgorithmicMedia"
"""IPTC's terms for what a model has made of a prompt, and of something that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAs:
    """How a run's files are written. The artifact in the store stays what decode made.

    Attributes:
        format: `png`, `jpeg` or `webp`; `mp4` for videos.
        quality: 1 to 100 of a lossy format.
        source_type: IPTC's digital source type that the file is labelled with; empty for none.
    """

    format: Literal["png", "jpeg", "webp", "mp4"] = "png"
    quality: int = DEFAULT_QUALITY
    source_type: str = ""

    @property
    def extension(self) -> str:
        """Of the files' names."""
        return _EXTENSIONS[self.format]

    @property
    def media_type(self) -> str:
        """Of the files."""
        return f"{'video' if self.format == 'mp4' else 'image'}/{self.format}"


def choose_saving(
    *,
    format: str,
    quality: int | None,
    label: str | None,
    size: tuple[int, int],
    prompts: Sequence[str],
    is_from_prompt: bool,
) -> SaveAs:
    """How files are written, checked.

    Args:
        size: Width and height of the pictures.
        prompts: Each prompt with its negative prompt.
        is_from_prompt: Whether nothing but a prompt is given: no picture and no video.

    Raises:
        RequestError: The format cannot hold it, or a value is not allowed.
    """
    known = (*get_args(PictureFormat), "mp4")
    if format not in known:
        raise RequestError(f"format is {shown(format)}, allowed are {', '.join(known[:-1])}")
    if quality is not None:
        if format not in LONGEST_EDGE:
            raise RequestError(
                f"quality is {shown(quality)}, but a {format} has none to choose; leave it out, "
                "or set format to jpeg or webp"
            )
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100:
            raise RequestError(f"quality is {shown(quality)}, allowed are 1 to 100")
    if label is not None and label not in get_args(Label):
        raise RequestError(
            f"label is {shown(label)}, allowed is {' or '.join(get_args(Label))}; leave it out "
            "for no label"
        )
    if max(size) > (longest := LONGEST_EDGE.get(format, max(size))):
        raise RequestError(
            f"the picture is {size[0]}x{size[1]} pixels, but a {format} has edges of at most "
            f"{longest}; set format to png"
        )
    if format == "jpeg":
        _check_prompts(prompts)
    source = PAINTED if is_from_prompt else PAINTED_OVER
    return SaveAs(
        format=format,  # type: ignore[arg-type]  # it is one of them
        quality=DEFAULT_QUALITY if quality is None else quality,
        source_type=source if label else "",
    )


def _check_prompts(prompts: Sequence[str]) -> None:
    for prompt in prompts:
        as_json = escape(json.dumps(prompt, ensure_ascii=False)).encode("utf-8", "replace")
        nbytes = max(len(as_json), len(prompt.encode("utf-16-be", "replace")))
        if nbytes > MAX_JPEG_PROMPT_NBYTES:
            raise RequestError(
                f"a prompt with its negative prompt takes {nbytes} bytes, but the settings in a "
                f"jpeg have room for {MAX_JPEG_PROMPT_NBYTES} of them; set format to png or webp"
            )

"""Videos that a user gives: read frame by frame within limits, upright, at one size.

A video is known by its frames from here on, not by its file. Which reader opens a file is told by
its first bytes, so that no list of other files or addresses is ever followed. This module loads
no torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from stages.errors import RequestError
from stages.framing import cut_sentence, framed
from stages.image_inputs import InputLimits, content_of

LIMITS = InputLimits(max_bytes=2 * 2**30, max_pixels=16 * 2**20)
"""Of the file, and of one frame."""

_READERS = (
    (4, b"ftyp", "mp4"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (0, b"RIFF", "avi"),
    (0, b"GIF8", "gif"),
)
"""Offset, first bytes, reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputVideo:
    """A video that was read.

    Attributes:
        name: The argument that it was given for, such as `video`.
        frames: Mode `RGB`, or `L` for a mask; all of one size.
        frame_rate: Frames a second, as the file says; None where it does not.
        has_more: Whether the file goes on after the last frame that was read.
        warnings: What was left out, in sentences.
    """

    name: str
    frames: list[Image.Image] = field(repr=False)
    frame_rate: float | None
    has_more: bool
    warnings: tuple[str, ...] = ()


def read_video(
    source: object,
    *,
    most_frames: int,
    size_for: Callable[[int, int], tuple[int, int]],
    name: str = "video",
    is_mask: bool = False,
    allow_urls: bool = False,
    limits: InputLimits = LIMITS,
) -> InputVideo:
    """The first frames of a video, each cut and scaled to one size.

    Args:
        source: A path or URL, as for a picture: MP4, MOV, Matroska, WebM, AVI or GIF.
        most_frames: How many are read; at least 1.
        size_for: Height and width to bring frames to, by the width and height they have.
        is_mask: Read as grey.

    Raises:
        RequestError: It cannot be read or is no video; the message says which and why.
    """
    import av

    data, where = content_of(source, name, allow_urls, limits)
    reader = next((each for at, first, each in _READERS if data[at:].startswith(first)), None)
    if reader is None:
        raise RequestError(
            f"{where} is no video that is read here; give an MP4, MOV, Matroska, WebM, AVI or GIF"
        )
    try:
        with av.open(io.BytesIO(data), "r", format=reader) as container:
            return _read(container, where, name, most_frames, size_for, is_mask, limits)
    except av.error.FFmpegError as error:
        raise RequestError(f"{where} is damaged: {error.strerror}; save it anew") from error


def _read(
    container: Any,
    where: str,
    name: str,
    most_frames: int,
    size_for: Callable[[int, int], tuple[int, int]],
    is_mask: bool,
    limits: InputLimits,
) -> InputVideo:
    if not container.streams.video and not container.streams.audio:
        raise RequestError(f"{where} is damaged: it holds no stream; save it anew")
    if not container.streams.video:
        raise RequestError(f"{where} holds no pictures, only sound; give a video")
    stream = container.streams.video[0]
    if stream.width * stream.height > limits.max_pixels:
        raise RequestError(
            f"{where} has frames of {stream.width} x {stream.height} pixels, allowed are "
            f"{limits.max_pixels} in all; save it smaller"
        )
    frames: list[Image.Image] = []
    told: list[str] = []
    has_more = False
    for frame in container.decode(stream):
        if len(frames) == most_frames:
            has_more = True
            break
        picture = _upright(frame)
        if not frames:
            height, width = size_for(*picture.size)
            if sentence := cut_sentence(name, picture, height, width):
                told.append(sentence)
        made = framed(picture, height, width)
        frames.append(made.convert("L") if is_mask else made)
    if len(frames) < max(1, min(stream.frames, most_frames)):
        raise RequestError(
            f"{where} is damaged: it holds {len(frames)} of {stream.frames} frames; save it anew"
        )
    rate = stream.average_rate
    return InputVideo(
        name=name,
        frames=frames,
        frame_rate=None if not rate else float(rate),
        has_more=has_more,
        warnings=tuple(told),
    )


def _upright(frame: Any) -> Image.Image:
    """A frame as a player shows it: the rotation that a phone notes is applied."""
    picture: Image.Image = frame.to_image()
    turns = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180}
    turns[270] = Image.Transpose.ROTATE_270
    turn = turns.get(round(frame.rotation) % 360)
    return picture if turn is None else picture.transpose(turn)

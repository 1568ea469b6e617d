"""Decoded videos to MP4 artifacts: pixels to frames one by one, sound beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stages.errors import ModelError
from stages.mp4 import Sound, encode_mp4

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.families import Family

FRAME_RATE = "frame_rate"
"""The option of a decode request that says how many frames a second of the video has."""


def encode_videos(
    family: Family,
    pipe: Any,
    values: dict[str, Any],
    frame_rate: float,
    warn: Callable[[str], None],
) -> list[bytes]:
    """An MP4 of each video that a decode phase made, with its sound if it has any.

    Args:
        pipe: The pipeline, which knows the sound's sample rate.
        values: The family's products: videos of shape `(B, F, 3, H, W)` in [0, 1], and sound of
            shape `(B, channels, samples)` in [-1, 1].
        warn: Tells the user.

    Raises:
        ModelError: The model does not tell the sound's sample rate.
    """
    videos_BFCHW = values[family.output]  # noqa: N806 - its shape
    sounds: list[Sound | None] = [None] * len(videos_BFCHW)
    if family.sound:
        sounds = [sound_of(family, pipe, waveform) for waveform in values[family.sound]]
    files = []
    for n, (video, sound) in enumerate(zip(videos_BFCHW, sounds, strict=True)):
        if sound and (text := length_sentence(f"video-{n}", len(video), frame_rate, sound)):
            warn(text)
        files.append(encode_mp4(frames(video), frame_rate, sound))
    return files


def frames(video_FCHW: torch.Tensor) -> Iterator[NDArray[np.uint8]]:  # noqa: N803 - its shape
    """RGB levels of shape `(H, W, 3)`, frame by frame; only one frame is converted at a time.

    Args:
        video_FCHW: Values in [0, 1], any float dtype.
    """
    for pixels_CHW in video_FCHW:  # noqa: N806
        levels = (pixels_CHW.float().clamp(0, 1) * 255).round().to(torch.uint8)
        yield levels.permute(1, 2, 0).contiguous().cpu().numpy()


def sound_of(family: Family, pipe: Any, waveform: torch.Tensor) -> Sound:
    """A waveform of shape `(channels, samples)` with the sample rate that its model tells.

    Raises:
        ModelError: No such entry is in the component's configuration.
    """
    component, entry = family.sound_rate
    rate = getattr(pipe, component).config.get(entry)
    if type(rate) is not int or rate < 1:
        raise ModelError(
            f"configuration of {component} does not tell how many samples a second its sound has: "
            f"{entry} is {rate!r}; fetch the model again"
        )
    return Sound(samples=waveform.float().cpu().numpy(), sample_rate=rate)


def length_sentence(name: str, num_frames: int, frame_rate: float, sound: Sound) -> str | None:
    """A warning about sound that ends a frame or more before or after its video; None if not."""
    seconds, heard = num_frames / frame_rate, sound.samples.shape[1] / sound.sample_rate
    if abs(heard - seconds) < 1 / frame_rate:
        return None
    what = "the rest is cut" if heard > seconds else "silence follows"
    return f"{name} lasts {seconds:.3g} s, its sound {heard:.3g} s; {what}"


def glance(video_FCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803 - its shape
    """A video as one picture of shape `(C, F x H, W)`, for checks that look at all pixels."""
    return video_FCHW.transpose(0, 1).flatten(1, 2)

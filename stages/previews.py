"""Previews: small pictures of a loop's latents while it denoises, for people who wait.

A preview reads the loop's tensors and changes none of them. It shows where the loop is going: the
step's own estimate of the clean latents, where the scheduler's rule allows one, else the latents
as they are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from stages.file_writes import temp_name

LONG_EDGE = 256
"""Pixels of the longer edge at most; latents are smaller than that, and are enlarged."""

_QUALITY = 85
_SPREAD = 2.5  # standard deviations of the mean channel from grey to black and to white

LatentRgb = Sequence[Sequence[float]]
"""A row of three for each channel, and one more for the constant: latents to RGB from -1 to 1."""


class Previews:
    """Writes a request's preview every few steps, always under one name.

    Args:
        path: Of the picture, with the ending `.jpg`; its folder is made when it is needed.
        every_steps: Steps between two.
        grid: Rows and columns of tokens, for latents that are packed; None where unknown.
        latent_channels: Channels of the VAE's latents; None where unknown.
        layout: The family's own layout of its latents, such as `BFCHW`.
        latent_rgb: How to make colours of channels; None shows their mean as grey.
        on_picture: Told of finished steps, of all steps and of the path.
        warn: Tells the user, once, why there is no preview.
    """

    def __init__(
        self,
        path: Path,
        *,
        every_steps: int,
        grid: tuple[int, int] | None,
        latent_channels: int | None,
        layout: str = "",
        latent_rgb: LatentRgb | None = None,
        on_picture: Callable[[int, int, str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path, self._every_steps = path, every_steps
        self._grid, self._latent_channels, self._layout = grid, latent_channels, layout
        self._latent_rgb, self._on_picture, self._warn = latent_rgb, on_picture, warn
        self._refusal = ""

    def step_done(self, step: int, num_steps: int, pipe: Any, block_state: Any) -> None:
        """Write a preview if one is due; the last step needs none. Never fails the loop.

        Args:
            step: Finished steps, from 1.
        """
        if self._refusal or step % self._every_steps or step >= num_steps:
            return
        try:
            frames = self._frames(clean_latents(pipe, block_state, step))
            picture = side_by_side([to_picture(each, self._latent_rgb) for each in frames])
            replace_quickly(self._path, as_jpeg(picture))
        except (OSError, RuntimeError, ValueError) as error:
            self._refusal = str(error)
            self._warn(f"no preview can be made: {error}; denoising goes on without")
            return
        self._on_picture(step, num_steps, str(self._path))

    def clear(self) -> None:
        """Remove the preview of a request whose result is there."""
        self._path.unlink(missing_ok=True)

    def _frames(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """The first and the middle frame of the first job, each `(C, H, W)`.

        Raises:
            ValueError: Packed latents whose grid is not known.
        """
        if latents.ndim == 3:
            latents = unpacked(latents, self._grid, self._latent_channels)
        elif latents.ndim == 5 and self._layout == "BFCHW":
            latents = latents.transpose(1, 2)
        elif latents.ndim == 4:
            latents = latents.unsqueeze(2)
        if latents.ndim != 5:
            raise ValueError(f"latents have shape {tuple(latents.shape)}, which is no picture's")
        middle = latents.shape[2] // 2
        return [latents[0, :, frame] for frame in sorted({0, middle})]


def read_latent_rgb(directory: Path) -> LatentRgb | None:
    """What a model says of its latents' colours, `latent_rgb` in its `exeunt.json`; often nothing.

    What cannot be used counts as nothing: it is for people's eyes only.
    """
    try:
        found = json.loads((directory / "exeunt.json").read_text(encoding="utf-8"))
        rows = [[float(value) for value in row] for row in found["latent_rgb"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return rows if all(len(row) == 3 for row in rows) else None


def preview_path(folder: str | Path, request_digest: str) -> Path:
    """Where the preview of a request lies."""
    return Path(folder) / f"{request_digest[:16]}.jpg"


def clean_latents(pipe: Any, block_state: Any, step: int) -> torch.Tensor:
    """Where the last step was heading, or the latents it has made.

    Schedulers of Euler's kind move along a line: from the estimate x0 to the noise, at sigma. So
    after the step x0 = latents - sigma x prediction, with the new sigma.

    Raises:
        ValueError: The loop carries no latents.
    """
    latents = getattr(block_state, "latents", None)
    if not isinstance(latents, torch.Tensor):
        raise ValueError("the loop carries no latents")
    scheduler = getattr(pipe, "scheduler", None)
    predicted = getattr(block_state, "noise_pred", None)
    sigmas = getattr(scheduler, "sigmas", None)
    is_line = "Euler" in type(scheduler).__name__ or (
        getattr(getattr(scheduler, "config", None), "prediction_type", "") == "flow_prediction"
    )
    if (
        is_line
        and isinstance(predicted, torch.Tensor)
        and predicted.shape == latents.shape
        and sigmas is not None
        and step < len(sigmas)
    ):
        return latents.detach().float() - float(sigmas[step]) * predicted.detach().float()
    return latents.detach().float()


def unpacked(
    latents: torch.Tensor, grid: tuple[int, int] | None, latent_channels: int | None
) -> torch.Tensor:
    """Tokens `(B, L, C)` as pictures `(B, C, F, H, W)`; squares in channels are laid out.

    Raises:
        ValueError: No grid is known that the tokens fill.
    """
    num_tokens, channels = latents.shape[1:]
    rows, columns = grid or (0, 0)
    if not rows * columns or num_tokens % (rows * columns):
        raise ValueError(f"{num_tokens} tokens are no frames of {rows} x {columns}")
    frames = num_tokens // (rows * columns)
    if latent_channels and channels == 4 * latent_channels:
        squares = latents.view(len(latents), frames, rows, columns, latent_channels, 2, 2)
        laid = squares.permute(0, 4, 1, 2, 5, 3, 6)
        return laid.reshape(len(latents), latent_channels, frames, 2 * rows, 2 * columns)
    tokens = latents.reshape(len(latents), frames, rows, columns, channels)
    return tokens.permute(0, 4, 1, 2, 3)


def to_picture(latents: torch.Tensor, latent_rgb: LatentRgb | None = None) -> Image.Image:
    """Latents `(C, H, W)` as a small RGB picture.

    Raises:
        ValueError: They are not finite, or there is not a row of `latent_rgb` for each channel.
    """
    if latent_rgb is None:
        mean = latents.mean(dim=0)
        levels = (mean - mean.mean()) / (_SPREAD * mean.std().clamp(min=1e-6))
        colours = levels.expand(3, *levels.shape)
    else:
        if len(latent_rgb) != len(latents) + 1:
            raise ValueError(
                f"latent_rgb has {len(latent_rgb)} rows, but {len(latents)} channels take "
                f"{len(latents) + 1}"
            )
        rows = torch.tensor(latent_rgb, dtype=torch.float32, device=latents.device)
        colours = torch.einsum("chw,cr->rhw", latents, rows[:-1]) + rows[-1].view(3, 1, 1)
    if not bool(colours.isfinite().all()):
        raise ValueError("the latents are not finite")
    pixels = ((colours.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())
    scale = LONG_EDGE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BILINEAR)


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one size in a row."""
    width, height = pictures[0].size
    row = Image.new("RGB", (width * len(pictures), height))
    for number, picture in enumerate(pictures):
        row.paste(picture, (number * width, 0))
    return row


def replace_quickly(path: Path, data: bytes) -> None:
    """Write a file whole, in place of an older one, and wait for no disk: the loop goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(temp_name(path.name))
    try:
        temp.write_bytes(data)
        temp.replace(path)
    except OSError:
        temp.unlink(missing_ok=True)
        raise


def as_jpeg(picture: Image.Image) -> bytes:
    """The bytes of a JPEG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()

"""Placements drawn as pictures, anti-aliased, many at once and on any device.

Each shape is a signed distance in pixels: negative inside; coverage falls from 1 to 0 within one
pixel about the outline. Letters in shapes: B pictures, H = W = 128 pixels.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from PIL import Image
from torch import Tensor

from stages.miniature.grammar import COLOURS, OUTLINES, SHAPES, Placement
from stages.miniature.recipe import IMAGE_SIZE_PX

_NUM_SLOTS = 2
_EMPTY = -1.0
_NAMES = tuple(COLOURS)


def pack(placements: Sequence[Placement]) -> tuple[Tensor, Tensor]:
    """Placements as numbers, for `render`.

    Returns:
        Figures `(B, 2, 5)` float32: shape index (-1: none), colour index, x, y, radius; and the
        background's colour index `(B,)` int64.
    """
    rows = []
    for placement in placements:
        row = [
            (SHAPES.index(f.shape), _NAMES.index(f.colour), f.x, f.y, f.radius)
            for f in placement.figures
        ]
        rows.append(row + [(_EMPTY, 0, 0.0, 0.0, 1.0)] * (_NUM_SLOTS - len(row)))
    backgrounds = [_NAMES.index(placement.background) for placement in placements]
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(backgrounds)


def render(figures: Tensor, backgrounds: Tensor, *, size_px: int = IMAGE_SIZE_PX) -> Tensor:
    """Draw the top left `size_px` square of packed placements, on the device where they lie.

    Returns:
        Pictures `(B, 3, size_px, size_px)` float32 in 0..1.
    """
    device = figures.device
    palette = _palette(device)
    centres = torch.arange(size_px, dtype=torch.float32, device=device) + 0.5
    picture = palette[backgrounds][:, :, None, None].expand(-1, -1, size_px, size_px)
    for slot in range(figures.shape[1]):
        kind, colour, x, y, radius = figures[:, slot].unbind(-1)
        # in units of the radius, relative to the centroid
        across = ((centres[None, None, :] - x[:, None, None]) / radius[:, None, None]).expand(
            -1, size_px, -1
        )
        down = ((centres[None, :, None] - y[:, None, None]) / radius[:, None, None]).expand(
            -1, -1, size_px
        )
        distance = torch.full_like(across, torch.inf)
        for index, shape in enumerate(SHAPES):
            chosen = (kind == index)[:, None, None]
            distance = torch.where(chosen, _distance(shape, across, down), distance)
        coverage = (0.5 - distance * radius[:, None, None]).clamp(0, 1)[:, None]
        picture = torch.lerp(picture, palette[colour.long()][:, :, None, None], coverage)
    return picture


def draw(placement: Placement) -> Image.Image:
    """One picture, 128 x 128, RGB."""
    pixels = render(*pack([placement]))[0]
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).contiguous().numpy())


@lru_cache
def _palette(device: torch.device) -> Tensor:
    """The colours `(8, 3)` in 0..1; kept, since a CUDA graph cannot capture their upload."""
    return torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=device) / 255


def _distance(shape: str, across: Tensor, down: Tensor) -> Tensor:
    """Signed distance to the outline of a shape of radius 1 at the origin."""
    if shape == "circle":
        return torch.hypot(across, down) - 1
    corners = OUTLINES[shape]
    nearest = torch.full_like(across, torch.inf)
    inside = torch.zeros_like(across, dtype=torch.bool)
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        ex, ey = x1 - x0, y1 - y0
        px, py = across - x0, down - y0
        along = ((px * ex + py * ey) / (ex * ex + ey * ey)).clamp(0, 1)
        nearest = torch.minimum(nearest, (px - along * ex) ** 2 + (py - along * ey) ** 2)
        if ey != 0:  # even-odd rule: a ray to the right crosses this edge
            crosses = (down >= min(y0, y1)) & (down < max(y0, y1))
            inside ^= crosses & (px < py * (ex / ey))
    return torch.where(inside, -nearest.sqrt(), nearest.sqrt())

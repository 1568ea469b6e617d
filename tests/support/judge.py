"""Says whether a picture shows a scene: colour segmentation, shape, size, place, background.

Written against the drawings of `stages.miniature.draw`, but shares no drawing code with them:
the templates that shapes are compared with are rasterised by Pillow.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from stages.miniature.grammar import COLOURS, OUTLINES, SHAPES, Figure, Scene

_COLOUR_TOLERANCE = 55.0  # RGB distance of a flat area from its named colour
_FOREGROUND_DISTANCE = 48.0  # a pixel this far from the background's colour belongs to a shape
_MIN_PURITY = 0.85  # share of a shape's inner pixels, or of the background, near its colour
_SPECK_PX = 30  # smaller islands are noise, unless they sum up to more than this
_MIN_OVERLAP = 0.80  # intersection over union with the best template
_RADIUS_PX = {"small": (7.0, 13.0), "large": (14.5, 22.0)}
_SUPERSAMPLE = 4

Pixels = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """One shape seen in a picture; position and equal-area radius in pixels."""

    shape: str
    overlap: float
    colour: str | None
    purity: float
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Verdict:
    """`ok`, or what is wrong in words; and what was seen."""

    problems: tuple[str, ...]
    found: tuple[Found, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems


def judge(picture: Image.Image, scene: Scene) -> Verdict:
    """Compare an RGB picture with all that the scene says; unsaid sizes and places are free."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    border = np.concatenate([pixels[:2].reshape(-1, 3), pixels[-2:].reshape(-1, 3)])
    border = np.concatenate([border, pixels[:, :2].reshape(-1, 3), pixels[:, -2:].reshape(-1, 3)])
    ground = np.median(border, axis=0)
    problems = []
    seen = _name_colour(ground)
    if seen != scene.background_colour:
        problems.append(f"background is {seen}, not {scene.background_colour}")
    foreground = np.linalg.norm(pixels - ground, axis=-1) > _FOREGROUND_DISTANCE
    islands = _islands(foreground)
    specks = sum(int(island.sum()) for island in islands if island.sum() < _SPECK_PX)
    if specks >= _SPECK_PX:
        problems.append(f"specks cover {specks} pixels")
    if _purity(pixels, ~_grow(foreground), ground) < _MIN_PURITY:
        problems.append("background is not flat")
    found = tuple(_measure(pixels, island) for island in islands if island.sum() >= _SPECK_PX)
    if len(found) != len(scene.figures):
        problems.append(f"shows {len(found)} shapes, not {len(scene.figures)}")
        return Verdict(tuple(problems), found)
    answers = [_compare(order, scene) for order in permutations(found)]
    problems += sorted(answers, key=len)[0]
    return Verdict(tuple(problems), found)


def _compare(found: tuple[Found, ...], scene: Scene) -> list[str]:
    problems = []
    for seen, figure in zip(found, scene.figures, strict=True):
        problems += _compare_figure(seen, figure)
    if scene.relation is not None:
        right, down = found[1].x - found[0].x, found[1].y - found[0].y
        horizontal = scene.relation in ("left of", "right of")
        ahead = scene.relation in ("left of", "above")
        distance, other = (right, down) if horizontal else (down, right)
        if (distance > 0) != ahead or abs(distance) <= abs(other):
            problems.append(
                f"second lies {right:.0f} px right and {down:.0f} px down of the first, "
                f"which is not {scene.relation} it"
            )
    return problems


def _compare_figure(seen: Found, figure: Figure) -> list[str]:
    problems = []
    name = f"{figure.colour} {figure.shape}"
    if seen.shape != figure.shape or seen.overlap < _MIN_OVERLAP:
        problems.append(f"{name} looks like a {seen.shape} (overlap {seen.overlap:.2f})")
    if seen.colour != figure.colour or seen.purity < _MIN_PURITY:
        problems.append(f"{name} is {seen.colour} (purity {seen.purity:.2f})")
    ranges = [_RADIUS_PX[figure.size]] if figure.size else list(_RADIUS_PX.values())
    if not any(low <= seen.radius <= high for low, high in ranges):
        problems.append(f"{name} has radius {seen.radius:.1f} px, not {figure.size or 'a size'}")
    return problems


def _measure(pixels: Pixels, island: Mask) -> Found:
    rows, columns = np.nonzero(island)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    radius = float(np.sqrt(island.sum() / np.pi))
    inner = ~_grow(~island)
    if not inner.any():
        inner = island
    colour = np.median(pixels[inner], axis=0)
    overlaps = {shape: _overlap(island, shape, x, y, radius) for shape in SHAPES}
    shape = max(overlaps, key=lambda name: overlaps[name])
    purity = _purity(pixels, inner, colour)
    return Found(shape, overlaps[shape], _name_colour(colour), purity, x, y, radius)


def _overlap(island: Mask, shape: str, x: float, y: float, radius: float) -> float:
    template = _template(shape, round(x * 2) / 2, round(y * 2) / 2, round(radius * 4) / 4)
    return float((island & template).sum() / (island | template).sum())


@lru_cache(maxsize=4096)
def _template(shape: str, x: float, y: float, radius: float, size: int = 128) -> Mask:
    canvas = Image.new("L", (size * _SUPERSAMPLE, size * _SUPERSAMPLE))
    pen = ImageDraw.Draw(canvas)
    if shape == "circle":
        box = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse([value * _SUPERSAMPLE for value in box], fill=255)
    else:
        pen.polygon(
            [
                ((x + radius * cx) * _SUPERSAMPLE, (y + radius * cy) * _SUPERSAMPLE)
                for cx, cy in OUTLINES[shape]
            ],
            fill=255,
        )
    small = canvas.resize((size, size), Image.Resampling.BOX)
    return np.asarray(small) >= 128


def _name_colour(colour: Pixels) -> str | None:
    distances = {
        name: float(np.linalg.norm(colour - np.asarray(rgb))) for name, rgb in COLOURS.items()
    }
    name = min(distances, key=lambda key: distances[key])
    return name if distances[name] <= _COLOUR_TOLERANCE else None


def _purity(pixels: Pixels, where: Mask, colour: Pixels) -> float:
    if not where.any():
        return 0.0
    near = np.linalg.norm(pixels[where] - colour, axis=-1) <= _FOREGROUND_DISTANCE
    return float(near.mean())


def _grow(mask: Mask) -> Mask:
    """The mask and its eight neighbours."""
    padded = np.pad(mask, 1)
    height, width = mask.shape
    grown = np.zeros_like(mask)
    for down in range(3):
        for right in range(3):
            grown |= padded[down : down + height, right : right + width]
    return grown


def _islands(mask: Mask) -> list[Mask]:
    """The connected parts of a mask, four neighbours counted."""
    height, width = mask.shape
    todo = {(int(row), int(column)) for row, column in zip(*np.nonzero(mask), strict=True)}
    islands = []
    while todo:
        edge = [todo.pop()]
        members = list(edge)
        while edge:
            row, column = edge.pop()
            for near in (
                (row - 1, column),
                (row + 1, column),
                (row, column - 1),
                (row, column + 1),
            ):
                if near in todo:
                    todo.remove(near)
                    edge.append(near)
                    members.append(near)
        island = np.zeros((height, width), dtype=bool)
        island[tuple(np.array(members).T)] = True
        islands.append(island)
    return islands

"""The scenes that the miniature model paints, as data: sampled, placed and split for testing.

Pure Python. A `Scene` is what a caption says; a `Placement` is one picture of it, in pixels.
"""

import hashlib
import math
from dataclasses import dataclass
from random import Random

from stages.miniature.recipe import IMAGE_SIZE_PX

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "orange": (240, 130, 20),
    "yellow": (252, 222, 60),
    "green": (40, 150, 70),
    "blue": (30, 85, 215),
    "purple": (150, 50, 170),
    "black": (25, 25, 28),
    "white": (245, 245, 242),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
DEFAULT_BACKGROUND = "white"

RADIUS_PX = {"small": (9.0, 11.0), "large": (17.0, 19.5)}
"""Radius of the circle of equal area, in pixels, from and to."""

_MARGIN_PX = 4.0  # no shape comes closer to the border
_GAP_PX = 8.0  # no two shapes come closer to each other along the axis of their relation
_HELD_OUT_PARTS = 10  # one part in ten of all scenes is never trained on

_STAR_RATIO = 0.5  # inner radius over outer radius


def _outlines() -> dict[str, tuple[tuple[float, float], ...]]:
    """Corners of each polygon about its centroid, y down, scaled to the area of a unit circle."""
    side = math.sqrt(math.pi) / 2
    square = ((-side, -side), (side, -side), (side, side), (-side, side))
    ring = math.sqrt(4 * math.pi / (3 * math.sqrt(3)))
    triangle = tuple(
        (ring * math.sin(turn), -ring * math.cos(turn))
        for turn in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
    )
    outer = math.sqrt(math.pi / (5 * _STAR_RATIO * math.sin(math.pi / 5)))
    star = tuple(
        (
            outer * (1.0 if i % 2 == 0 else _STAR_RATIO) * math.sin(i * math.pi / 5),
            -outer * (1.0 if i % 2 == 0 else _STAR_RATIO) * math.cos(i * math.pi / 5),
        )
        for i in range(10)
    )
    return {"square": square, "triangle": triangle, "star": star}


OUTLINES = _outlines()


@dataclass(frozen=True, slots=True)
class Figure:
    """One shape of a scene. `size` None: the caption does not say, either is right."""

    shape: str
    colour: str
    size: str | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """One or two figures; `figures[0]` is `relation` (say, left of) `figures[1]`.

    `relation` None with two figures: any arrangement is right. `background` None: the caption
    does not say, and `DEFAULT_BACKGROUND` is right.
    """

    figures: tuple[Figure, ...]
    relation: str | None = None
    background: str | None = None

    @property
    def background_colour(self) -> str:
        """The name of the colour to be seen behind the figures."""
        return self.background or DEFAULT_BACKGROUND


@dataclass(frozen=True, slots=True)
class Placed:
    """A figure in the picture: centroid and equal-area radius, in pixels from the top left."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Placement:
    """All that `draw` needs for one picture."""

    figures: tuple[Placed, ...]
    background: str


def is_held_out(scene: Scene) -> bool:
    """Whether the scene belongs to the tenth that training never sees, at any size or wording.

    Sizes do not enter, and mirrored wordings (A left of B, B right of A) are one scene, so a
    held-out picture cannot have been trained on under another caption.
    """
    parts = [f"{figure.colour} {figure.shape}" for figure in scene.figures]
    relation = scene.relation or ""
    if relation in ("right of", "below"):
        parts.reverse()
        relation = {"right of": "left of", "below": "above"}[relation]
    elif not relation:
        parts.sort()
    key = "|".join([scene.background_colour, relation, *parts])
    return hashlib.sha256(key.encode()).digest()[0] % _HELD_OUT_PARTS == 0


def sample_scene(rng: Random, *, held_out: bool = False) -> Scene:
    """Draw one scene at random from the held-out tenth or from the rest.

    Three of ten scenes hold one figure; of those with two, one in eight names no relation.
    A figure never has the colour of the background.
    """
    while True:
        background = None if rng.random() < 0.25 else rng.choice(list(COLOURS))
        palette = [name for name in COLOURS if name != (background or DEFAULT_BACKGROUND)]
        figures = tuple(
            Figure(
                shape=rng.choice(SHAPES),
                colour=rng.choice(palette),
                size=None if rng.random() < 0.3 else rng.choice(SIZES),
            )
            for _ in range(1 if rng.random() < 0.3 else 2)
        )
        related = len(figures) == 2 and rng.random() >= 0.125
        scene = Scene(figures, rng.choice(RELATIONS) if related else None, background)
        if is_held_out(scene) == held_out:
            return scene


def extents(shape: str) -> tuple[float, float, float, float]:
    """Reach of a shape of radius 1 from its centroid: left, right, up, down; all positive."""
    if shape == "circle":
        return (1.0, 1.0, 1.0, 1.0)
    xs, ys = zip(*OUTLINES[shape], strict=True)
    return (-min(xs), max(xs), -min(ys), max(ys))


def place(scene: Scene, rng: Random) -> Placement:
    """Choose where and how large each figure of the scene is drawn."""
    relation = scene.relation
    order = list(scene.figures)
    if len(order) == 2 and relation is None:
        relation = rng.choice(RELATIONS)
    if relation in ("right of", "below"):
        order.reverse()
    radii = [rng.uniform(*RADIUS_PX[figure.size or rng.choice(SIZES)]) for figure in order]
    horizontal = relation in ("left of", "right of") or (relation is None and rng.random() < 0.5)
    reach = [extents(figure.shape) for figure in order]
    along = (0, 1) if horizontal else (2, 3)
    across = (2, 3) if horizontal else (0, 1)

    lengths = [radius * (e[along[0]] + e[along[1]]) for radius, e in zip(radii, reach, strict=True)]
    gap = _GAP_PX if len(order) == 2 else 0.0
    free = IMAGE_SIZE_PX - 2 * _MARGIN_PX - sum(lengths) - gap
    cuts = sorted(rng.uniform(0.0, free) for _ in order)
    starts = [_MARGIN_PX + cuts[0]]
    if len(order) == 2:
        starts.append(_MARGIN_PX + cuts[1] + gap + lengths[0])
    middle = IMAGE_SIZE_PX / 2 + rng.uniform(-12.0, 12.0)
    placed = []
    for figure, radius, e, start in zip(order, radii, reach, starts, strict=True):
        low = _MARGIN_PX + radius * e[across[0]]
        high = IMAGE_SIZE_PX - _MARGIN_PX - radius * e[across[1]]
        second = min(max(middle + rng.uniform(-6.0, 6.0), low), high)
        first = start + radius * e[along[0]]
        x, y = (first, second) if horizontal else (second, first)
        placed.append(Placed(figure.shape, figure.colour, x, y, radius))
    if relation in ("right of", "below"):
        placed.reverse()  # back to the order of the caption
    return Placement(tuple(placed), scene.background_colour)

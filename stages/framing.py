"""Pictures cut and scaled to the size of a video that starts from them. Loads no torch.

Pipelines scale a picture in ways of their own, and some choose another size by it. One that has
the video's size already passes all of them as it is.
"""

from __future__ import annotations

from PIL import Image

CUT_TOLERANCE = 0.05
"""Share of a picture that may be cut off without a word."""


def framed(picture: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of a picture, scaled to a size in pixels; nothing is stretched."""
    if picture.size == (width, height):
        return picture
    return picture.resize(
        (width, height), Image.Resampling.LANCZOS, box=_box(picture, height, width)
    )


def cut_sentence(name: str, picture: Image.Image, height: int, width: int) -> str | None:
    """A warning about a picture of which much is cut off; None if hardly anything is."""
    left, top, right, bottom = _box(picture, height, width)
    share = 1 - (right - left) * (bottom - top) / (picture.width * picture.height)
    if share <= CUT_TOLERANCE:
        return None
    return (
        f"{name} is {picture.width} x {picture.height} pixels, its middle is taken for a video of "
        f"{width} x {height}: {100 * share:.0f} % are cut off; give height or width alone to keep "
        "its form"
    )


def _box(picture: Image.Image, height: int, width: int) -> tuple[float, float, float, float]:
    """The largest part about the middle that has the form of the video."""
    scale = min(picture.width / width, picture.height / height)
    left = max(0.0, (picture.width - width * scale) / 2)  # rounding may go below
    top = max(0.0, (picture.height - height * scale) / 2)
    return left, top, picture.width - left, picture.height - top

"""Pictures at the size of a video: the middle of them, nothing stretched."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from stages.framing import cut_sentence, framed


def circle(width: int, height: int, radius: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    inside = (x - (width - 1) / 2) ** 2 + (y - (height - 1) / 2) ** 2 < radius**2
    return Image.fromarray(np.where(inside, 255, 0).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(("width", "height"), [(400, 200), (200, 400), (300, 300), (90, 120)])
def test_a_circle_stays_a_circle_in_the_middle(width: int, height: int) -> None:
    made = framed(circle(width, height, min(width, height) // 3), 96, 64)
    assert made.size == (64, 96)
    lit = np.argwhere(np.asarray(made)[:, :, 0] > 127)
    (top, left), (bottom, right) = lit.min(0), lit.max(0)
    assert abs((bottom - top) - (right - left)) <= 1
    assert abs((top + bottom) / 2 - 47.5) <= 1 and abs((left + right) / 2 - 31.5) <= 1


def test_a_picture_of_the_right_size_is_left_as_it_is() -> None:
    picture = circle(64, 96, 20)
    assert framed(picture, 96, 64) is picture
    assert cut_sentence("image", picture, 96, 64) is None


def test_only_what_is_cut_off_is_told_and_how_much() -> None:
    assert cut_sentence("image", Image.new("RGB", (1280, 962)), 480, 640) is None
    sentence = cut_sentence("last_image", Image.new("RGB", (1000, 500)), 480, 480)
    assert sentence is not None and sentence.startswith("last_image is 1000 x 500 pixels")
    assert "50 % are cut off" in sentence

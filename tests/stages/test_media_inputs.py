"""Pictures as artifacts: by their pixels, in the form of any other artifact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.artifacts import ArtifactStore
from stages.handover import pack, unpack
from stages.image_inputs import read_picture
from stages.media_inputs import put_media
from stages.phases import Handover
from tests.support.picture_tasks import mask, picture, saved


@pytest.mark.parametrize("medium", [picture(1, 5, 3), mask(8), [picture(1), picture(2, 7, 7)]])
def test_an_artifact_of_pictures_is_a_handover(
    tmp_path: Path, medium: Image.Image | list[Image.Image]
) -> None:
    store = ArtifactStore(tmp_path)
    made = put_media(store, {"image": medium})
    assert store.read(made.only()) == pack("media", Handover(values={"image": medium}), {})
    back = unpack(store.path(made.only())).handover.values["image"]
    pairs = zip(back, medium, strict=True) if isinstance(medium, list) else [(back, medium)]
    for one, other in pairs:
        assert one.mode == other.mode
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_one_picture_under_two_names_is_one_artifact(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    png, bmp = (saved(picture(1), tmp_path / name) for name in ("a.png", "b.bmp"))
    made = [put_media(store, {"image": read_picture(path).pixels}) for path in (png, bmp)]
    assert made[0] == made[1]
    changed = picture(1)
    changed.putpixel((0, 0), (1, 2, 3))
    assert put_media(store, {"image": changed}) != made[0]
    assert put_media(store, {"mask_image": picture(1)}) != made[0]

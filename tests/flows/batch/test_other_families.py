"""Batches of other families: their own flows, without a line of theirs in the batch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stages.errors import RequestError
from stages.media import read_settings
from tests.flows.batch.conftest import Nights
from tests.support.picture_tasks import KONTEXT
from tests.support.video_cases import TEXT_CASES


def test_videos_of_prompts_and_of_pictures_go_through_one_batch(
    nights: Nights, tiny: Any, tmp_path: Path
) -> None:
    from flows.ltx2 import ltx2

    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    rows = [
        {"id": "plain", "prompt": "a fox", "seed": 1},
        {"id": "red", "prompt": "a fox", "seed": 2, "image": str(tmp_path / "red.png")},
    ]
    nights.write(rows)
    nights.model = tiny(TEXT_CASES["ltx2"])
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    nights.shared = size | {"max_sequence_length": 16}
    ran = nights.run(family="ltx2", name="clips/{id}")
    assert [row.status for row in ran.rows.values()] == ["done", "done"]
    assert ran.started["denoise"] == 1 and ran.ran["condition"] == 1
    red = ran.rows["red"]
    assert (red.file, red.media_type) == ("clips/red.mp4", "video/mp4")
    path = nights.output / "clips" / "red.mp4"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == red.file_sha256
    assert read_settings(path).num_frames == 9
    own = {name: value for name, value in rows[1].items() if name != "id"}
    alone = nights.shared | {"model": str(nights.model), "device": "cpu"}
    (single,) = ltx2(**own | alone | {"output": str(tmp_path / "alone")})
    assert single.digest == red.picture_sha256


def test_each_row_edits_a_picture_of_its_own(nights: Nights, tiny: Any, tmp_path: Path) -> None:
    for colour in ("red", "blue"):
        Image.new("RGB", (64, 64), colour).save(tmp_path / f"{colour}.png")
    nights.write(
        [
            {"id": name, "prompt": "make it winter", "seed": 1, "image": str(tmp_path / picture)}
            for name, picture in {"a": "red.png", "b": "blue.png", "c": "red.png"}.items()
        ]
    )
    nights.model = tiny(KONTEXT)
    nights.shared = {"height": 64, "width": 64, "num_inference_steps": 2}
    ran = nights.run(family="flux-kontext")
    assert ran.ran["condition"] == 2 and ran.ran["denoise"] == 2  # the third row is the first
    pictures = {name: row.picture_sha256 for name, row in ran.rows.items()}
    assert pictures["a"] == pictures["c"] != pictures["b"]


@pytest.fixture(scope="module", autouse=True)
def _serves_them(batch_launcher: Any) -> None:
    for family in ("ltx2", "flux-kontext"):
        batch_launcher.expect(family)


def test_what_a_family_cannot_do_without_is_asked_for(nights: Nights) -> None:
    from flows.batch.families import batch_family
    from flows.batch.flow import batch

    nights.write([{"prompt": "make it winter"}])
    with pytest.raises(RequestError, match="flux-kontext needs model, one for all rows"):
        batch(str(nights.table), "flux-kontext", output=str(nights.output))
    with pytest.raises(RequestError, match="image is empty, and qwen-image-edit needs one"):
        batch_family("qwen-image-edit").check({"prompt": "make it winter", "model": "x"})

"""What a batch does before its first row, at its first start and at later ones."""

from __future__ import annotations

import hashlib
import shutil
from collections import namedtuple
from typing import Any

import pytest

from flows.batch.past import read_past
from flows.batch.rows import Work
from flows.settings import RunSettings
from stages.errors import RequestError
from stages.media import read_settings
from tests.flows.batch.conftest import Nights


def test_a_batch_that_cannot_fit_starts_nothing_unless_it_is_told_to(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write([{"prompt": "a red fox", "seed": n} for n in range(2)])
    usage = namedtuple("usage", "total used free")
    found: Any = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 10**4, 10**4))
    with pytest.raises(RequestError, match="the batch of 2 rows cannot fit"):
        nights.run()
    assert not (nights.home / "store" / "records").exists()
    monkeypatch.setattr(shutil, "disk_usage", found)
    assert nights.run(forecast=False).summary.num_done == 2

    settings = RunSettings.from_env()
    past = read_past(
        settings.home.reports, store_url=settings.store_url, family="z-image",
        model=nights.model.name, dtype="float32", device="cpu",
    )  # fmt: skip
    size = {"height": 64, "width": 64}
    work = Work(**size, num_frames=1, num_inference_steps=2, is_guided=False)
    for stage in ("encode", "denoise", "decode"):  # the next night's forecast
        assert past.seconds(stage, work)
        assert past.nbytes(stage, work)
    assert past.peak_host_bytes > 10 * 2**20


def test_each_file_says_which_row_it_is(nights: Nights) -> None:
    rows = [{"id": f"row-{n}", "prompt": f"a fox, {n}", "seed": 2**64 - 1 - n} for n in range(2)]
    nights.write(rows)
    ran = nights.run()
    for row in rows:
        settings = read_settings(nights.output / f"{row['id']}.png")
        assert settings.row_id == row["id"]
        assert (settings.prompt, settings.seed) == (row["prompt"], row["seed"])
        assert settings.artifacts == ran.rows[str(row["id"])].digests
        assert {"transformer", "text_encoder", "vae"} <= settings.model_hashes.keys()

    again = nights.run(arguments={"format": "jpeg", "label": "iptc"})
    assert (again.ran, again.summary.num_done) == ({}, 2)
    for name, row in again.rows.items():
        assert (row.file, row.media_type) == (f"{name}.jpg", "image/jpeg")
        content = (nights.output / f"{name}.jpg").read_bytes()
        assert hashlib.sha256(content).hexdigest() == row.file_sha256
        assert content.startswith(b"\xff\xd8") and b"/trainedAlgorithmicMedia<" in content
        assert read_settings(nights.output / f"{name}.jpg").row_id == name
    assert nights.run(arguments={"format": "jpeg", "label": "iptc"}).summary.num_run == 0

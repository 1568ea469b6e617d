"""Whole batches: real stage processes, a real Prefect server, a tiny model."""

from __future__ import annotations

import hashlib

from stages.media import read_settings
from tests.flows.batch.conftest import Nights

ONE_EACH = {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}


def test_every_good_row_has_its_picture_and_a_bad_row_is_a_result(nights: Nights) -> None:
    nights.write(
        [
            {"id": "fox", "prompt": "a red fox", "seed": 1},
            {"id": "fox-again", "prompt": "a red fox", "seed": 2},
            {"id": "bad", "prompt": "a red fox", "seed": 3, "height": 77},
            {"id": "owl", "prompt": "an owl", "negative_prompt": "blur", "guidance_scale": 3.0},
        ]
    )
    ran = nights.run(name="{seed}-{prompt}")
    assert ran.started == ONE_EACH
    assert ran.ran == {"inspect": 1, "encode": 2, "denoise": 3, "decode": 3}  # equal prompts once
    assert {name: row.status for name, row in ran.rows.items()} == {
        "fox": "done",
        "fox-again": "done",
        "bad": "invalid",
        "owl": "done",
    }
    assert "77" in (ran.rows["bad"].error or "")
    assert (ran.summary.num_done, ran.summary.num_invalid, ran.summary.num_run) == (3, 1, 3)

    fox = ran.rows["fox"]
    assert fox.file == "1-a-red-fox.png"
    path = nights.output / fox.file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == fox.file_sha256
    assert read_settings(path).seed == fox.seed == 1
    assert set(fox.seconds) == set(fox.requests) == {"encode", "denoise", "decode"}
    assert set(fox.digests) == {"encode.prompt_embeds", "denoise.latents", "decode.image-0"}
    assert fox.peak_host_bytes and not fox.cached and fox.attempts == 1
    assert "encode" not in ran.rows["fox-again"].seconds
    owl = ran.rows["owl"]
    assert (owl.negative_prompt, owl.guidance_scale) == ("blur", 3.0)
    assert sorted(p.name for p in nights.output.iterdir()) == sorted(
        [*(row.file for row in ran.rows.values() if row.file), "batch.jsonl", "results.parquet"]
    )

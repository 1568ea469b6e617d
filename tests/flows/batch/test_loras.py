"""Rows of a table that wear LoRA files of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from stages.media import read_settings
from tests.flows.batch.conftest import Nights
from tests.support.lora_files import factors, write_lora
from tests.support.studio import TINY


def test_each_row_wears_its_own_files_and_has_the_bits_it_has_alone(nights: Nights) -> None:
    from flows.z_image import z_image

    folder = nights.table.parent
    one, two = (
        write_lora(folder / f"{n}.safetensors", factors(nights.model, "transformer", seed=n))
        for n in (1, 2)
    )
    alien = write_lora(folder / "alien.safetensors", {"unet.x.lora_A.weight": one_by_two()})
    worn = {
        "plain": None,
        "one": str(one),
        "both": [f"{one}:0.5", f"{two}:-1"],
        "again": str(one),
        "last": None,
    }
    rows = [{"id": name, "prompt": "a fox", "seed": 7, "lora": lora} for name, lora in worn.items()]
    nights.write([*rows, {"id": "bad", "prompt": "a fox", "lora": str(alien)}])
    ran = nights.run()
    assert {row.status for name, row in ran.rows.items() if name != "bad"} == {"done"}
    assert ran.rows["bad"].status == "invalid"
    assert "factors without" in (ran.rows["bad"].error or "")
    assert ran.started["encode"] == ran.started["denoise"] == 1
    assert ran.ran["encode"] == 1 and ran.ran["denoise"] == 3
    digests = {name: row.digests.get("denoise.latents") for name, row in ran.rows.items()}
    assert digests["plain"] == digests["last"] and digests["one"] == digests["again"]
    assert len({digests["plain"], digests["one"], digests["both"]}) == 3
    assert read_settings(nights.output / str(ran.rows["both"].file)).adapters == {"1": 0.5, "2": -1}
    for name in ("plain", "both"):
        (alone,) = z_image(
            **TINY,
            prompt="a fox",
            seed=7,
            model=str(nights.model),
            device="cpu",
            lora=worn[name],
            output=str(folder / "alone"),
            fresh=True,
        )
        assert alone.digest == ran.rows[name].digests["decode.image-0"]


def one_by_two() -> object:
    import torch

    return torch.zeros(1, 2)

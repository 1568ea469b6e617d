"""The dtype as an argument of a flow."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.z_image import check


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "auto"])
def test_less_range_than_the_model_was_made_with_is_told(
    home: Path, tmp_path: Path, dtype: str
) -> None:
    job = check(
        prompt="a fox",
        model="miniature",
        dtype=dtype,
        device="cpu",
        output=str(tmp_path / "pictures"),
    )

    told = [text for text in job.warnings if text.startswith("dtype is float16")]
    assert job.dtype == {"auto": "float32"}.get(dtype, dtype)
    assert len(told) == len(job.warnings) == (dtype == "float16")

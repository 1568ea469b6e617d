"""Where only store and home can be written, a run writes nowhere else and needs nothing else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from stages.artifacts import ArtifactStore
from tests.support import tiny_models
from tests.support.chain import context, request, run_stage
from tests.support.users import NOBODY, nobody, open_to_others

TEXT = {"prompt": "a small red fox", "max_sequence_length": 64}
LOOP = {"height": 64, "width": 64, "num_inference_steps": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_model_and_a_users_home_that_may_only_be_read_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_to_others(tmp_path)
    where = context(tiny_models.z_image(root / "model"), root)
    for path in (root / "model").rglob("*"):  # libraries save for their owner alone
        path.chmod(0o755 if path.is_dir() else 0o644)
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    for folder in (root / "store", root / "home"):
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
    before = {path: path.stat().st_mtime_ns for path in files_of_others(root)}

    with nobody():
        with pytest.raises(PermissionError):
            (root / "model" / "file").touch()
        embeds = run_stage(request("encode", TEXT), where)[0]
        latents = run_stage(request("denoise", LOOP, embeds, seed=1), where)[0]
        images = run_stage(request("decode", {}, latents), where)[0]

    assert ArtifactStore(where.store_url).read(images.artifacts["image-0"]).startswith(b"\x89PNG")
    assert {path: path.stat().st_mtime_ns for path in files_of_others(root)} == before


def files_of_others(root: Path) -> list[Path]:
    """All that is neither in the store nor in the home."""
    own = (root / "store", root / "home")
    return [path for path in root.rglob("*") if not any(path.is_relative_to(o) for o in own)]

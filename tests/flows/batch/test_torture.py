"""A short version of `tests.benchmarks.batch_torture`: one blow of each kind."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import tiny_models
from tests.support.torture import Torture, rows, undisturbed

EDGE, NUM_STEPS = 64, 2
ARGUMENTS = {"num_inference_steps": NUM_STEPS, "guidance_scale": 1, "height": EDGE, "width": EDGE}


def test_whatever_is_killed_every_good_row_has_its_picture_and_every_bad_one_its_reason(
    tmp_path: Path,
) -> None:
    model, table = tiny_models.z_image(tmp_path / "model"), rows(12)
    torture = Torture(tmp_path, model, table, ARGUMENTS, chunk=7, disk=tmp_path / "disk")
    try:
        torture.play(["child", "server", "flow"], seed=1, between_s=(0.5, 3.0))
        torture.finish()
        threads = len(os.sched_getaffinity(0))
        verdict = torture.judge(
            undisturbed(model, table, edge=EDGE, num_steps=NUM_STEPS, num_threads=threads)
        )
    finally:
        torture.stop()
    assert verdict.faults == []
    assert verdict.hits.total() >= 2  # the last one may come too late

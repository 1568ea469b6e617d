"""Which components a phase loads, and how often they are called, told without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.forecast_records import Job
from stages.forecasts import forecast_model
from stages.models import open_model
from stages.workloads import workloads
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import NUM_FRAMES, PICTURE_CASES, VIDEO_CASES, VideoCase


def job(**options: Any) -> Job:
    usual: dict[str, Any] = {
        "height": 64,
        "width": 64,
        "num_inference_steps": 10,
        "is_guided": False,
        "max_sequence_length": 32,
        "dtype": "float32",
    }
    return Job(**usual | options)


@pytest.mark.parametrize("name", [*CASES, *VIDEO_CASES])
def test_each_phase_loads_what_it_loads_in_a_run(name: str, tiny: Any) -> None:
    case: Case | VideoCase = {**CASES, **VIDEO_CASES}[name]
    options: dict[str, Any] = {}
    if isinstance(case, VideoCase):
        size = {"height": case.edge, "width": case.edge, "num_frames": NUM_FRAMES}
        options = size | {"num_media": len(case.media), "frame_rate": case.frame_rate}
        options["task"] = case.task
    found: dict[str, set[str]] = {}
    works = workloads(open_model(tiny(case)), case.family, job(**options))
    for work in works:
        found.setdefault(work.phase, set()).add(work.component)
    assert found == case.loads
    assert all(
        work.flops > 0 and work.activation_bytes > 0
        for work in works
        if work.component not in ("audio_vae", "vocoder")  # small beside a video
    )


def test_two_denoisers_share_the_steps_at_their_boundary(tiny: Any) -> None:
    """What their scheduler gives the first one: the noise levels over the boundary."""
    import diffusers

    case = VIDEO_CASES["wan22"]
    model = open_model(tiny(case))
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(tiny(case) / "scheduler")
    scheduler.set_timesteps(40)
    first = int((scheduler.timesteps >= 0.875 * 1000).sum())
    works = workloads(model, case.family, job(num_inference_steps=40, num_frames=9, frame_rate=16))
    calls = {work.component: work.num_calls for work in works if work.phase == "denoise"}
    assert calls["transformer"] == pytest.approx(first, abs=1)
    assert sum(calls.values()) == 40


def test_frames_and_pictures_take_work(tiny: Any) -> None:
    case = PICTURE_CASES["wan-i2v from a picture"]
    model = open_model(tiny(case))

    def flops(phase: str, component: str, **options: Any) -> float:
        found = workloads(model, case.family, job(frame_rate=16.0, **options))
        return sum(w.flops for w in found if (w.phase, w.component) == (phase, component))

    for phase, component in (("denoise", "transformer"), ("decode", "vae")):
        one = flops(phase, component, num_frames=9)
        assert flops(phase, component, num_frames=81) > 6 * one
    assert flops("condition", "vae", num_frames=9) == 0
    assert flops("condition", "vae", num_frames=9, num_media=1) > 0
    assert flops("condition", "image_encoder", num_frames=9, num_media=1) > 0


def test_weights_beyond_the_host_budget_make_a_step_longer(tmp_path: Path) -> None:
    from stages.forecast_records import Rates
    from stages.offload_rules import choose_offload
    from tests.support import header_models

    model = header_models.z_image(tmp_path / "model")
    rates = Rates(link_bytes_per_s=50e9, flops_per_s=4000e12, source="measured")

    def transformer(host: str) -> Any:
        choice = choose_offload("stream", "8GiB", host)
        found = forecast_model(model, choice=choice, rates=rates)
        return next(c for c in found.components if c.component == "transformer"), found.notes

    roomy, plain = transformer("64GiB")
    tight, told = transformer("1GiB")
    assert roomy.staged_bytes == 0 < tight.staged_bytes
    assert tight.step_s > roomy.step_s
    assert any("host budget" in note for note in told)
    assert not any("host budget" in note for note in plain)

"""Every family's phases on a CUDA device: the bits of its unsplit pipeline there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.components import bind, renew_job_state
from stages.families import Family
from stages.handover import pack, unpack
from stages.phases import Handover, run_phase, split
from tests.support.picture_tasks import KONTEXT
from tests.support.tiny_families import CASES
from tests.support.video_cases import VIDEO_CASES
from tests.support.whole_run import run_whole

PICTURES = CASES | {KONTEXT.name: KONTEXT}
DTYPE = torch.bfloat16

pytestmark = [
    # diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def run_phases(
    family: Family,
    task: str,
    model_dir: Path,
    options: dict[str, dict[str, Any]],
    scales: dict[str, float],
    folder: Path,
    device: str,
) -> dict[str, Any]:
    """What the last phase makes, each one reading what the one before it left in a file."""
    graph, handed = split(family, task), Handover()
    for phase in graph.phases:
        pipe = bind(graph, phase, model_dir, dtype=DTYPE, device=device)
        renew_job_state(pipe, scales)
        seed = 7 if phase == "denoise" or phase in family.drawing else None
        handed = run_phase(graph, phase, pipe, options[phase], handed, seed=seed)
        if phase != "decode":
            (folder / phase).write_bytes(pack(phase, handed, {}))
            handed = unpack(folder / phase, device).handover
    return dict(handed.values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sd15", *sorted(set(PICTURES) - {"sd15"})])
def test_a_picture_has_the_bits_of_the_unsplit_pipeline(
    name: str, device: str, tiny: Any, tmp_path: Path
) -> None:
    if device == "cpu" and name != "sd15":
        pytest.skip("test_families.py shows all of them on the CPU")
    case = PICTURES[name]
    options = case.options | {"decode": {"output_type": "pt"}}
    every = {key: value for phase in options.values() for key, value in phase.items()}
    scales, model_dir = case.guidance, tiny(case)
    made = run_phases(case.family, "text-to-image", model_dir, options, scales, tmp_path, device)
    expected = run_whole(
        case.family, model_dir, every, seed=7, dtype=DTYPE, guidance=scales, device=device
    )
    assert made[case.family.output].device.type == device
    assert torch.equal(made[case.family.output], expected)


@pytest.mark.parametrize("device", [DEVICES[1]])
@pytest.mark.parametrize("name", sorted(VIDEO_CASES))
def test_a_video_has_the_bits_of_the_unsplit_pipeline(
    name: str, device: str, tiny: Any, tmp_path: Path
) -> None:
    case = VIDEO_CASES[name]
    options, scales, model_dir = case.options, case.scales, tiny(case)
    options["decode"]["output_type"] = "pt"
    if case.media:
        options["condition"] |= case.media
    made = run_phases(case.family, case.task, model_dir, options, scales, tmp_path, device)
    expected = run_whole(
        case.family,
        model_dir,
        {**case.arguments, "output_type": "pt"},
        seed=7,
        dtype=DTYPE,
        guidance=scales,
        output=list(case.family.products),
        device=device,
    )
    for product in case.family.products:
        assert torch.equal(made[product], expected[product])

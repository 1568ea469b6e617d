"""The six rules of `stages.phases`, each with a job whose bits are wrong without it.

Some of these jobs have no command yet; the engine runs them from a declaration like any other.
Every handover goes through a file, as it does between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stages.components import bind, renew_job_state
from stages.families import Family, family_named
from stages.handover import pack, unpack
from stages.phases import Graph, Handover, run_phase, split
from tests.support import tiny_models
from tests.support.whole_run import run_whole

# diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = {"height": 64, "width": 64, "num_inference_steps": 3}
TEXT = {"prompt": "a small red fox", "max_sequence_length": 64}
WAN22 = Family(
    name="wan22",
    pipeline="Wan22ModularPipeline",
    models=("WanPipeline",),
    tasks={"text-to-video": ("prompt",)},
    output="videos",
)
VACE = replace(
    WAN22, pipeline="Wan22VaceModularPipeline", tasks={"vace": ("prompt", "video", "mask")}
)


def picture(seed: int, edge: int = 64) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 255, (edge, edge, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def mask(edge: int) -> Image.Image:
    levels = np.zeros((edge, edge), np.uint8)
    levels[edge // 4 : edge * 3 // 4, edge // 4 : edge * 3 // 4] = 255
    return Image.fromarray(levels)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of the whole pipeline, which is given to the phases by the names they take."""

    family: Family
    build: Callable[[Path], Path]
    arguments: Mapping[str, Any]
    guidance: Mapping[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def task(self) -> str:
        return next(iter(self.family.tasks))

    def whole(self, model_dir: Path) -> Any:
        given = dict(self.arguments)
        guidance = dict(self.guidance)
        return run_whole(self.family, model_dir, given, seed=7, dtype=self.dtype, guidance=guidance)

    def staged(self, model_dir: Path, folder: Path) -> Any:
        graph, handed = split(self.family, self.task), Handover()
        for phase in graph.phases:
            pipe = bind(graph, phase, model_dir, dtype=self.dtype, device="cpu")
            renew_job_state(pipe, self.guidance)
            options = self.options(graph, phase)
            made = run_phase(graph, phase, pipe, options, handed, seed=7)
            if phase == "decode":
                return made.values[self.family.output]
            path = folder / f"{phase}.safetensors"
            path.write_bytes(pack(phase, made, {}))
            handed = unpack(path).handover
        raise AssertionError("no phase")

    def options(self, graph: Graph, phase: str) -> dict[str, Any]:
        taken = graph.input_names(phase)
        return {name: value for name, value in self.arguments.items() if name in taken}


def task_of(family: str, name: str, *triggers: str) -> Family:
    return replace(family_named(family), tasks={name: ("prompt", *triggers)})


JOBS = {
    "1 blocks are resolved over the whole graph": Job(
        family=task_of("qwen-image", "inpaint", "image", "mask_image", "padding_mask_crop"),
        build=tiny_models.qwen_image,
        arguments={
            **TEXT,
            "negative_prompt": "blurry",
            "num_inference_steps": 3,
            "image": picture(1, 128),
            "mask_image": mask(128),
            "padding_mask_crop": 8,
            "strength": 0.9,
            "height": 64,
            "width": 64,
            "output_type": "pil",
        },
    ),
    "2 guiders come from the whole pipeline": Job(
        family=WAN22,
        build=tiny_models.wan22,
        arguments={
            **TEXT,
            **SIZE,
            "negative_prompt": "blurry",
            "num_frames": 9,
            "output_type": "pt",
        },
    ),
    "3 absent models lend their configuration": Job(
        family=family_named("sd3"),
        build=partial(tiny_models.sd3, num_vae_blocks=3),
        arguments={**TEXT, **SIZE, "negative_prompt": "blurry", "output_type": "pt"},
    ),
    "4 values that travel as a group": Job(
        family=VACE,
        build=partial(tiny_models.wan22, is_vace=True),
        arguments={
            **TEXT,
            **SIZE,
            "negative_prompt": "blurry",
            "num_frames": 9,
            "video": [picture(n) for n in range(9)],
            "mask": [Image.new("L", (64, 64), 255)] * 9,
            "conditioning_scale": 0.7,
            "output_type": "pt",
        },
    ),
    "5 the generator's state": Job(
        family=task_of("z-image", "image-to-image", "image"),
        build=tiny_models.z_image,
        arguments={**TEXT, **SIZE, "image": picture(1), "strength": 0.7, "output_type": "pt"},
    ),
    "6 strides": Job(
        family=task_of("sdxl", "image-to-image", "image"),
        build=tiny_models.sdxl,
        arguments={
            **SIZE,
            "prompt": "a small red fox",
            "negative_prompt": "blurry",
            "image": picture(1),
            "strength": 0.7,
            "output_type": "pt",
        },
    ),
}


@pytest.mark.parametrize("rule", sorted(JOBS))
def test_a_job_that_needs_the_rule_has_the_bits_of_the_whole_pipeline(
    rule: str, tmp_path: Path
) -> None:
    job = JOBS[rule]
    model_dir = job.build(tmp_path / "model")
    whole, staged = job.whole(model_dir), job.staged(model_dir, tmp_path)
    if isinstance(whole, torch.Tensor):
        assert torch.equal(whole, staged)
    else:
        assert [one.size for one in whole] == [one.size for one in staged]
        assert all(
            np.array_equal(np.asarray(one), np.asarray(other))
            for one, other in zip(whole, staged, strict=True)
        )

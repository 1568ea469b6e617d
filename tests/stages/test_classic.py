"""Families that diffusers has a classic pipeline for and no modular one: what is theirs alone.

What they share with all others (equal bits whole and staged, alone and in a batch, resumed or
not) is shown in `test_families.py` and `test_checkpoints.py`.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from stages import classic
from stages.artifacts import ArtifactStore
from stages.contracts import StageContext, StageResult
from stages.errors import BorderError
from stages.families import FAMILIES, family_named
from stages.handover import unpack
from stages.mp4 import encode_mp4
from stages.videos import frames
from tests.stages.test_checkpoints import kill, loop_request
from tests.support import tiny_models, tiny_videos
from tests.support.chain import context, request, run_stage
from tests.support.kept_pipes import drop_kept
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES
from tests.support.whole_run import run_classic

# diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

SD15 = CASES["sd15"]


def staged(case: Case, where: StageContext) -> StageResult:
    """The decode stage's result of a case, out of all stages."""
    results: tuple[StageResult, ...] = ()
    for stage, options in case.requests.items():
        seed = {"seed": 7} if stage == "denoise" else {}
        asked = request(stage, options, *results, family=case.name, **seed)
        results = (run_stage(asked, where)[0],)
    return results[0]


def whole(case: Case, model: Path) -> Any:
    every = {name: value for phase in case.options.values() for name, value in phase.items()}
    return run_classic(
        case.family,
        model,
        {**every, "output_type": "pil"},
        seed=7,
        dtype=torch.float32,
        guidance=case.guidance,
    )


def pixels(where: StageContext, result: StageResult) -> np.ndarray[Any, Any]:
    png = ArtifactStore(where.store_url).read(result.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


def test_no_stage_knows_a_classic_family() -> None:
    stages = Path(classic.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in stages.glob("*.py"))
    names = [name for name in FAMILIES if family_named(name).encoded]
    assert len(names) >= 4
    for name in names:
        assert family_named(name).pipeline not in code and f'"{name}"' not in code


@pytest.mark.parametrize("name", ["sd15", "pixart", "sana"])
def test_without_guidance_no_negative_is_encoded_and_bits_are_the_whole_pipelines(
    tiny: Any, tmp_path: Path, name: str
) -> None:
    case = replace(CASES[name], scale=1.0)
    where = context(tiny(case), tmp_path)
    embeds = run_stage(request("encode", case.requests["encode"], family=name), where)[0]
    held = unpack(ArtifactStore(where.store_url).path(embeds.only())).handover.values
    assert held["negative_prompt_embeds"] is None
    assert np.array_equal(
        pixels(where, staged(case, where)), np.asarray(whole(case, tiny(case))[0])
    )


@pytest.mark.parametrize("scheduler", ["PNDMScheduler", "EulerAncestralDiscreteScheduler"])
def test_a_denoise_resumes_with_the_bits_of_the_whole_pipeline_under_other_schedulers(
    tmp_path: Path, scheduler: str
) -> None:
    """PNDM carries four predictions and takes a step more; the other one draws in each step."""
    model = tiny_models.sd15(tmp_path / "model", scheduler=scheduler)
    where = context(model, tmp_path, checkpoint_every_steps=1)
    embeds = run_stage(request("encode", SD15.requests["encode"], family="sd15"), where)[0]
    asked = request("denoise", SD15.requests["denoise"], embeds, family="sd15", seed=7)
    kill(asked, where, 2)
    latents, report, _ = run_stage(asked, where)
    assert report["resumed_from_step"] == 2
    made = run_stage(request("decode", {}, latents, family="sd15"), where)[0]
    assert np.array_equal(pixels(where, made), np.asarray(whole(SD15, model)[0]))


def test_the_denoiser_computes_one_step_that_was_done_and_rests_for_the_others(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = context(tiny(SD15), tmp_path, checkpoint_every_steps=1)
    embeds = run_stage(request("encode", SD15.requests["encode"], family="sd15"), where)[0]
    asked = loop_request(SD15, embeds)
    kill(asked, where, 4)
    drop_kept()
    calls = []
    forward = diffusers.UNet2DConditionModel.forward

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", counted)
    run_stage(asked, where)
    assert len(calls) == 1 + 2  # of six steps; the first one gives the shape of the others


def test_a_model_and_its_scheduler_are_left_as_they_were(tiny: Any, tmp_path: Path) -> None:
    from stages import execute

    where = context(tiny(SD15), tmp_path)
    embeds = run_stage(request("encode", SD15.requests["encode"], family="sd15"), where)[0]
    run_stage(request("denoise", SD15.requests["denoise"], embeds, family="sd15", seed=7), where)
    (kept,) = execute._KEPT
    assert "forward" not in vars(kept.pipe.unet)
    assert type(kept.pipe.scheduler) is diffusers.DDIMScheduler


def test_a_size_between_those_that_were_taught_is_painted_and_cut_as_by_the_whole_pipeline(
    tmp_path: Path,
) -> None:
    """The decoder is told the size that was asked for by the latents' artifact."""
    model = tiny_models.pixart(tmp_path / "model", sample_size=32)
    loop = {"use_resolution_binning": True, "height": 208, "width": 304}
    case = replace(CASES["pixart"], loop=loop)
    where = context(model, tmp_path)
    made = pixels(where, staged(case, where))
    assert made.shape == (208, 304, 3)
    assert np.array_equal(made, np.asarray(whole(case, model)[0]))


@pytest.mark.parametrize(
    ("scheduler", "patch_size_t"), [("CogVideoXDPMScheduler", None), ("CogVideoXDDIMScheduler", 2)]
)
def test_a_video_resumes_with_the_bits_of_the_whole_pipeline(
    tmp_path: Path, scheduler: str, patch_size_t: int | None
) -> None:
    """The one hands a second value to the next step, the other one decodes no padding frame."""
    case = VIDEO_CASES["cogvideox"]
    model = tiny_videos.cogvideox(
        tmp_path / "model", scheduler=scheduler, patch_size_t=patch_size_t
    )
    where = context(model, tmp_path, checkpoint_every_steps=1)
    task = {"family": case.name, "task": case.task}
    embeds = run_stage(request("encode", case.requests["encode"], **task), where)[0]
    asked = request("denoise", case.requests["denoise"], embeds, seed=7, **task)
    kill(asked, where, 2)
    latents, report, _ = run_stage(asked, where)
    assert report["resumed_from_step"] == 2
    held = unpack(ArtifactStore(where.store_url).path(latents.only()))
    assert held.facts["latents"]["tensors"]["latents"]["layout"] == "BFCHW"
    made = run_stage(request("decode", case.requests["decode"], latents, **task), where)[0]
    expected = run_classic(
        case.family,
        model,
        {**case.arguments, "output_type": "pt"},
        seed=7,
        dtype=torch.float32,
        guidance=case.scales,
    )
    video = ArtifactStore(where.store_url).read(made.artifacts["video-0"])
    assert video == encode_mp4(frames(expected[0]), case.frame_rate, None)


def test_an_instruction_before_the_prompt_takes_nothing_from_its_tokens(
    tiny: Any, tmp_path: Path
) -> None:
    """Sana reads 30 of a limit of 32 tokens of the prompt itself, after a long instruction."""
    case = CASES["sana"]
    where = context(tiny(case), tmp_path)
    long = case.requests["encode"] | {"prompt": "0123456789" * 10}
    embeds = run_stage(request("encode", long, family="sana"), where)[0]
    held = unpack(ArtifactStore(where.store_url).path(embeds.only()))
    (use,) = [use for use in held.facts["tokens"] if use["prompt"] == "prompt"]
    assert use["tokens_used"] == 32 == held.handover.values["prompt_embeds"].shape[1]
    read = dict(long, prompt=("0123456789" * 10).removesuffix(use["dropped_text"]))
    same = run_stage(request("encode", read, family="sana"), where)[0]
    values = unpack(ArtifactStore(where.store_url).path(same.only())).handover.values
    assert torch.equal(values["prompt_embeds"], held.handover.values["prompt_embeds"])


def safety_checker(threshold: float) -> Any:
    """A checker that flags what is more alike to its concepts than a threshold of cosines."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=16,
    )
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 16}, vision_config=vision.to_dict(), projection_dim=16
    )
    checker = StableDiffusionSafetyChecker(config)
    with torch.no_grad():
        checker.concept_embeds_weights.fill_(threshold)
        checker.special_care_embeds_weights.fill_(2.0)
    return checker


def test_a_model_with_a_safety_checker_paints_what_the_whole_pipeline_paints(
    tmp_path: Path,
) -> None:
    model = tiny_models.sd15(tmp_path / "model", safety_checker=safety_checker(2.0))
    where = context(model, tmp_path)
    run_stage(request("inspect", {}, family="sd15"), where)
    made = staged(SD15, where)
    assert np.array_equal(pixels(where, made), np.asarray(whole(SD15, model)[0]))


def test_a_picture_that_the_models_checker_flags_is_an_error_and_no_black_picture(
    tmp_path: Path,
) -> None:
    model = tiny_models.sd15(tmp_path / "model", safety_checker=safety_checker(-2.0))
    with pytest.raises(BorderError, match=r"safety checker .* choose another prompt or seed"):
        staged(SD15, context(model, tmp_path))

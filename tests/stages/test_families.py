"""Every family through the one phase engine: equal bits, whole and staged, alone and together."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stages.artifacts import ArtifactStore
from stages.components import bind, renew_job_state
from stages.contracts import StageContext, StageResult
from stages.errors import BorderError, ModelError
from stages.families import FAMILIES, family_named, require_model_of
from stages.handover import pack, unpack
from stages.manifest import Manifest
from stages.phases import Handover, run_phase, split
from tests.support import tiny_models
from tests.support.chain import context, request, run_stage
from tests.support.picture_tasks import KONTEXT, TASKS
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES
from tests.support.whole_run import loaded_by_phase, run_whole

# diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

DTYPES = [torch.float32, torch.bfloat16]
TASK = "text-to-image"


TEXT_CASES = CASES | {KONTEXT.name: KONTEXT}  # an editor that paints without a picture, too


@pytest.fixture(params=sorted(TEXT_CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return TEXT_CASES[request.param]


def whole(case: Case, model_dir: Path, output_type: str, *, dtype: torch.dtype) -> Any:
    every = {name: value for phase in case.options.values() for name, value in phase.items()}
    return run_whole(
        case.family,
        model_dir,
        {**every, "output_type": output_type},
        seed=7,
        dtype=dtype,
        guidance=case.guidance,
    )


def stage(
    case: Case, where: StageContext, name: str, *inputs: StageResult, **changes: Any
) -> StageResult:
    options = case.requests[name] | changes.pop("options", {})
    if name == "denoise":
        changes.setdefault("seed", 7)
    return run_stage(request(name, options, *inputs, family=case.name, **changes), where)[0]


def pixels(where: StageContext, result: StageResult) -> np.ndarray[Any, Any]:
    png = ArtifactStore(where.store_url).read(result.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


def test_every_family_has_a_case_here() -> None:
    others = {task.case.name for task in TASKS.values()}  # see test_picture_tasks.py
    videos = {case.name for case in VIDEO_CASES.values()}
    assert set(CASES) | others | videos == set(FAMILIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phases_in_sequence_equal_the_unsplit_pipeline(
    case: Case, tiny: Any, dtype: torch.dtype
) -> None:
    graph, handed, model_dir = split(case.family, TASK), Handover(), tiny(case)
    options = case.options | {"decode": {"output_type": "pt"}}
    for phase in graph.phases:
        pipe = bind(graph, phase, model_dir, dtype=dtype, device="cpu")
        renew_job_state(pipe, case.guidance)
        seed = 7 if phase == "denoise" else None
        handed = run_phase(graph, phase, pipe, options[phase], handed, seed=seed)
    staged = handed.values[case.family.output]
    assert staged.shape == (1, 3, 64, 64)
    assert torch.equal(whole(case, model_dir, "pt", dtype=dtype), staged)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stages_through_artifacts_equal_the_unsplit_pipeline(
    case: Case, tiny: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    where, name = context(tiny(case), tmp_path), str(dtype).removeprefix("torch.")
    embeds = stage(case, where, "encode", dtype=name)
    latents = stage(case, where, "denoise", embeds, dtype=name)
    image = stage(case, where, "decode", latents, dtype=name)
    expected = whole(case, tiny(case), "pil", dtype=dtype)[0]
    assert np.array_equal(pixels(where, image), np.asarray(expected))


def test_a_job_in_a_batch_has_the_bits_it_has_alone(case: Case, tiny: Any, tmp_path: Path) -> None:
    """One process does a batch's requests one by one; nothing of one is left in the next."""
    where = context(tiny(case), tmp_path)
    embeds = stage(case, where, "encode")
    alone = stage(case, where, "denoise", embeds, seed=3)
    other = stage(case, where, "denoise", embeds, seed=4, options={"num_inference_steps": 5})
    assert other.only() != alone.only()
    assert stage(case, where, "denoise", embeds, seed=3) == alone
    assert stage(case, where, "encode", options={"prompt": "a robot"}) != embeds
    assert stage(case, where, "encode") == embeds


def test_phases_load_only_what_they_compute_with(case: Case, tiny: Any) -> None:
    graph = split(case.family, TASK)
    assert loaded_by_phase(graph, tiny(case)) == case.loads


def test_inspect_finds_a_familys_files_whole(case: Case, tiny: Any, tmp_path: Path) -> None:
    where = context(tiny(case), tmp_path)
    result = run_stage(request("inspect", {}, family=case.name), where)[0]
    manifest = Manifest.model_validate_json(ArtifactStore(where.store_url).read(result.only()))
    weighty = set(manifest.num_parameters)
    assert {
        phase: set(facts.components) & weighty for phase, facts in manifest.phases.items()
    } == case.loads
    taken = {phase: set(facts.options) for phase, facts in manifest.phases.items()}
    assert all(set(case.options[phase]) <= taken[phase] for phase in taken)


def test_a_model_that_moved_and_has_only_variant_weights_makes_the_same_bits(
    case: Case, tiny: Any, tmp_path: Path
) -> None:
    """In a folder with spaces and letters of another script, behind links."""
    here = context(tiny(case), tmp_path / "here")
    moved = Path(shutil.copytree(tiny(case), tmp_path / "модель two"))
    for weights in moved.glob("*/*.safetensors"):
        behind = weights.rename(tmp_path / f"{weights.parent.name}.safetensors")
        weights.with_name(f"{weights.stem}.fp16.safetensors").symlink_to(behind)
    there = context(moved, tmp_path / "there")
    made = []
    for where in (here, there):
        embeds = stage(case, where, "encode")
        latents = stage(case, where, "denoise", embeds)
        made.append([embeds, latents, stage(case, where, "decode", latents)])
    assert made[0] == made[1]


def test_what_each_encoder_does_not_read_is_told(case: Case, tiny: Any, tmp_path: Path) -> None:
    where = context(tiny(case), tmp_path)
    long = {"prompt": "red fox " * 100 + "hedgehog"}
    embeds = stage(case, where, "encode", options=long)
    facts = unpack(ArtifactStore(where.store_url).path(embeds.only())).facts
    cut = {use["encoder"]: use for use in facts["tokens"] if use["prompt"] == "prompt"}
    assert set(cut) == {reading.encoder for reading in case.family.tokenizers.values()}
    for use in cut.values():
        assert use["tokens_used"] < use["tokens_total"]
        assert use["dropped_text"].endswith("hedgehog")


def test_a_family_refuses_the_model_of_another_one(case: Case, tiny: Any) -> None:
    others = [family_named(name) for name in FAMILIES if name != case.name]
    for family in others:
        if set(family.models) & set(case.family.models):
            continue
        with pytest.raises(ModelError, match=rf"but {family.name} takes .*one of .*{case.name}"):
            require_model_of(family, case.family.models[0], str(tiny(case)))
    with pytest.raises(ModelError, match="no family here takes it"):
        require_model_of(case.family, "StableAudioPipeline", "somewhere")


def test_no_negative_prompt_is_zeros_where_the_model_was_trained_so(
    tiny: Any, tmp_path: Path
) -> None:
    """All zeros would be refused anywhere else."""
    case = replace(CASES["sdxl"], text={})
    where = context(tiny(case), tmp_path)
    embeds = stage(case, where, "encode")
    held = unpack(ArtifactStore(where.store_url).path(embeds.only())).handover.values
    assert not held["negative_prompt_embeds"].any()
    image = stage(case, where, "decode", stage(case, where, "denoise", embeds))
    expected = whole(case, tiny(case), "pil", dtype=torch.float32)[0]
    assert np.array_equal(pixels(where, image), np.asarray(expected))
    empty = stage(replace(case, text={"negative_prompt": ""}), where, "encode")
    assert empty != embeds


def test_a_positive_embedding_of_zeros_is_refused_all_the_same(tiny: Any, tmp_path: Path) -> None:
    case = CASES["sdxl"]
    where = context(tiny(case), tmp_path)
    embeds = stage(case, where, "encode")
    store = ArtifactStore(where.store_url)
    held = unpack(store.path(embeds.only()))
    held.handover.values["prompt_embeds"].zero_()
    ref = store.put(pack("encode", held.handover, held.facts))
    spoiled = StageResult(stage="encode", artifacts={"prompt_embeds": ref})
    with pytest.raises(BorderError, match=r"input prompt_embeds .* is constant"):
        stage(case, where, "denoise", spoiled)


def test_a_model_without_its_optional_text_encoder_is_as_good(tmp_path: Path) -> None:
    case = CASES["sd3"]
    model_dir = tiny_models.sd3(tmp_path / "model", has_t5=False)
    where = context(model_dir, tmp_path)
    run_stage(request("inspect", {}, family="sd3"), where)
    embeds = stage(case, where, "encode")
    image = stage(case, where, "decode", stage(case, where, "denoise", embeds))
    expected = whole(case, model_dir, "pil", dtype=torch.float32)[0]
    assert np.array_equal(pixels(where, image), np.asarray(expected))
    facts = unpack(ArtifactStore(where.store_url).path(embeds.only())).facts
    assert {use["encoder"] for use in facts["tokens"]} == {"text_encoder", "text_encoder_2"}

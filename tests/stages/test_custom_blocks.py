"""Reviewed blocks in the stages: the unsplit pipeline's bits, and nothing that was not reviewed."""

from __future__ import annotations

import io
import json
import traceback
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from stages.artifacts import ArtifactStore
from stages.block_locks import forget, write_lock
from stages.block_modules import reviewed_class
from stages.block_sources import read_block_sources
from stages.components import component_names, renew_job_state
from stages.contracts import StageContext, StageResult
from stages.errors import ModelError, RequestError
from tests.stages.test_checkpoints import kill
from tests.support.chain import context, request, run_stage
from tests.support.custom_blocks import DAMPED, marker_line, write_blocks
from tests.support.kept_pipes import drop_kept
from tests.support.tiny_families import CASES

CASE = CASES["z-image"]
PLACE = "denoise.denoise"

WHOLE_PIPELINE = DAMPED | {
    "modular_config.json": json.dumps({"auto_map": {"ModularPipelineBlocks": "whole.Everything"}}),
    "whole.py": """
from diffusers.modular_pipelines import SequentialPipelineBlocks
from diffusers.modular_pipelines.z_image.before_denoise import (
    ZImagePrepareLatentsStep, ZImageSetTimestepsStep, ZImageTextInputStep,
)
from diffusers.modular_pipelines.z_image.decoders import ZImageVaeDecoderStep
from diffusers.modular_pipelines.z_image.encoders import ZImageTextEncoderStep

from .block import Damped


class Denoise(SequentialPipelineBlocks):
    block_classes = [
        ZImageTextInputStep, ZImagePrepareLatentsStep, ZImageSetTimestepsStep, Damped
    ]
    block_names = ["input", "prepare_latents", "set_timesteps", "denoise"]


class Everything(SequentialPipelineBlocks):
    block_classes = [ZImageTextEncoderStep, Denoise, ZImageVaeDecoderStep]
    block_names = ["text_encoder", "denoise", "decode"]
""",
}


def reviewed(where: StageContext, files: dict[str, str], folder: Path) -> str:
    sources = read_block_sources(write_blocks(folder, files))
    write_lock(Path(where.home_dir), folder, sources)
    return sources.digest


def stage(
    where: StageContext, blocks: dict[str, str], name: str, *inputs: StageResult, **changes: Any
) -> StageResult:
    seed = {"seed": 7} if name == "denoise" else {}
    options = changes.pop("options", CASE.requests.get(name, {}))
    return run_stage(request(name, options, *inputs, blocks=blocks, **seed, **changes), where)[0]


def picture(
    where: StageContext,
    blocks: dict[str, str],
    loop: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    embeds = stage(where, blocks, "encode", **changes)
    options = {"options": CASE.requests["denoise"] | (loop or {})}
    latents = stage(where, blocks, "denoise", embeds, **options, **changes)
    made = stage(where, blocks, "decode", latents, **changes)
    png = ArtifactStore(where.store_url).read(made.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


def latents(where: StageContext, blocks: dict[str, str]) -> StageResult:
    return stage(where, blocks, "denoise", stage(where, blocks, "encode"))


def whole_picture(where: StageContext, digest: str, dtype: torch.dtype) -> Any:
    """The picture of the unsplit pipeline with the custom loop put into its blocks by hand."""
    pipe = diffusers.ZImageModularPipeline(pretrained_model_name_or_path=where.model_dir)
    blocks = pipe.blocks.get_execution_blocks(prompt=True)
    blocks.sub_blocks[PLACE] = reviewed_class(Path(where.home_dir), digest)()
    pipe = diffusers.ZImageModularPipeline(blocks, where.model_dir)
    pipe.load_components(names=component_names(pipe), dtype=dtype)
    renew_job_state(pipe, CASE.guidance)
    every = {key: value for options in CASE.options.values() for key, value in options.items()}
    generator = torch.Generator("cpu").manual_seed(7)
    return np.asarray(pipe(**every, generator=generator, output_type="pil", output="images")[0])


@pytest.fixture
def where(tiny: Any, tmp_path: Path) -> StageContext:
    return context(tiny(CASE), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_custom_loop_in_stages_equals_the_unsplit_pipeline(
    where: StageContext, tmp_path: Path, dtype: torch.dtype
) -> None:
    digest = reviewed(where, DAMPED, tmp_path / "blocks")
    name = str(dtype).removeprefix("torch.")
    made = picture(where, {PLACE: digest}, dtype=name)
    assert np.array_equal(made, whole_picture(where, digest, dtype))


def test_a_loop_of_its_own_resumes_with_equal_bits(where: StageContext, tmp_path: Path) -> None:
    blocks = {PLACE: reviewed(where, DAMPED, tmp_path / "blocks")}
    embeds = stage(where, blocks, "encode")
    expected = stage(where, blocks, "denoise", embeds)
    asked = request("denoise", CASE.requests["denoise"], embeds, blocks=blocks, seed=7)
    where = where.model_copy(update={"checkpoint_every_steps": 1})
    kill(asked, where, 2)
    result, report, _ = run_stage(asked, where)
    assert result == expected and report["resumed_from_step"] == 2


def test_options_of_a_custom_block_are_options_of_its_phase(
    where: StageContext, tmp_path: Path
) -> None:
    blocks = {PLACE: reviewed(where, DAMPED, tmp_path / "blocks")}
    embeds = stage(where, blocks, "encode")
    results = []
    for damping in (0.9, 0.5):
        options = CASE.requests["denoise"] | {"damping": damping}
        asked = request("denoise", options, embeds, blocks=blocks, seed=7)
        results.append(run_stage(asked, where)[0])
    assert results[0] == stage(where, blocks, "denoise", embeds) != results[1]


def test_the_report_tells_digest_class_and_files(where: StageContext, tmp_path: Path) -> None:
    digest = reviewed(where, DAMPED, tmp_path / "blocks")
    asked = request("encode", CASE.requests["encode"], blocks={PLACE: digest})
    told = run_stage(asked, where)[1]["blocks"][PLACE]
    sums = read_block_sources(tmp_path / "blocks").sha256_by_file
    assert told == {"digest": digest, "entry": "block.Damped", "files": sums}


def test_what_runs_is_the_reviewed_text_whatever_becomes_of_the_folder(
    where: StageContext, tmp_path: Path
) -> None:
    blocks = {PLACE: reviewed(where, DAMPED, tmp_path / "blocks")}
    before = latents(where, blocks)
    for name in ("block.py", "math_of/damping.py"):
        with (tmp_path / "blocks" / name).open("a") as file:
            file.write(marker_line(tmp_path / "marker"))
    drop_kept()
    assert latents(where, blocks) == before
    assert not (tmp_path / "marker").exists()


def test_code_that_was_not_reviewed_here_does_not_run(where: StageContext, tmp_path: Path) -> None:
    files = DAMPED | {"block.py": DAMPED["block.py"] + marker_line(tmp_path / "marker")}
    digest = reviewed(where, files, tmp_path / "blocks")
    forget(Path(where.home_dir), digest)
    for name in ("inspect", "encode"):
        with pytest.raises(ModelError, match="were not reviewed here"):
            stage(where, {PLACE: digest}, name)
    assert not (tmp_path / "marker").exists()


def test_two_folders_with_files_of_one_name_do_not_meet(
    where: StageContext, tmp_path: Path
) -> None:
    """diffusers copies both into one folder, where the second one replaces the first."""
    fainter = {name: text.replace("0.9", "0.5") for name, text in DAMPED.items()}
    digests = [
        reviewed(where, files, tmp_path / str(number))
        for number, files in enumerate((DAMPED, fainter))
    ]
    kinds = [reviewed_class(Path(where.home_dir), digest) for digest in digests]
    defaults = [kind().loop_inputs[-1].default for kind in kinds]
    assert defaults == [0.9, 0.5]
    made = [latents(where, {PLACE: digest}) for digest in digests]
    assert made[0] != made[1]


def test_blocks_may_be_a_whole_pipeline(where: StageContext, tmp_path: Path) -> None:
    everything = reviewed(where, WHOLE_PIPELINE, tmp_path / "whole")
    loop = reviewed(where, DAMPED, tmp_path / "blocks")
    assert latents(where, {"pipeline": everything}) == latents(where, {PLACE: loop})


def test_one_block_is_no_whole_pipeline(where: StageContext, tmp_path: Path) -> None:
    digest = reviewed(where, DAMPED, tmp_path / "blocks")
    with pytest.raises(ModelError, match="no sequence of blocks with one called denoise"):
        stage(where, {"pipeline": digest}, "encode")


def test_a_name_that_no_block_has_is_refused_with_those_there_are(
    where: StageContext, tmp_path: Path
) -> None:
    digest = reviewed(where, DAMPED, tmp_path / "blocks")
    with pytest.raises(RequestError, match=r"no block 'denoise.nothing' .* denoise\.denoise"):
        stage(where, {"denoise.nothing": digest}, "encode")


def test_a_component_from_elsewhere_is_refused_before_anything_loads(
    where: StageContext, tmp_path: Path
) -> None:
    asking = DAMPED["block.py"].replace(
        "    def loop_step",
        "    @property\n    def loop_expected_components(self):\n"
        "        from diffusers import AutoencoderKL\n"
        "        from diffusers.modular_pipelines import ComponentSpec\n"
        "        return [*super().loop_expected_components, ComponentSpec(\n"
        "            'other_vae', AutoencoderKL, pretrained_model_name_or_path='some/repo')]\n\n"
        "    def loop_step",
    )
    digest = reviewed(where, DAMPED | {"block.py": asking}, tmp_path / "blocks")
    with pytest.raises(ModelError, match=r"ask for a component 'other_vae', which .* not have"):
        stage(where, {PLACE: digest}, "inspect")


def test_an_error_in_reviewed_code_shows_its_lines(where: StageContext, tmp_path: Path) -> None:
    files = DAMPED | {"math_of/damping.py": "def damped(latents, factor):\n    return 1 / 0\n"}
    blocks = {PLACE: reviewed(where, files, tmp_path / "blocks")}
    embeds = stage(where, blocks, "encode")
    with pytest.raises(ZeroDivisionError) as caught:
        stage(where, blocks, "denoise", embeds)
    assert "return 1 / 0" in "".join(traceback.format_exception(caught.value))


def test_a_class_that_is_no_block_is_refused(where: StageContext, tmp_path: Path) -> None:
    files = DAMPED | {"block.py": "class Damped: ...\n"}
    digest = reviewed(where, files, tmp_path / "blocks")
    with pytest.raises(ModelError, match=r"block\.Damped .* is no ModularPipelineBlocks"):
        stage(where, {PLACE: digest}, "encode")

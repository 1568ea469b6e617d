"""Every task that starts from a picture: equal bits, whole and staged, alone and together."""

from __future__ import annotations

import io
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from stages.artifacts import ArtifactStore
from stages.contracts import StageContext, StageResult
from stages.errors import BorderError, RequestError, StageFailed
from stages.handover import unpack
from stages.manifest import Manifest
from stages.worker import handler_for
from tests.support import tiny_editors
from tests.support.chain import Heard, context, request, run_stage
from tests.support.picture_tasks import TASKS, PictureTask, chain, picture
from tests.support.whole_run import run_whole

# diffusers' Euler scheduler hands torch tensors to numpy in a way that numpy 2 advises against
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> PictureTask:
    found = TASKS[request.param]
    if found.case.name.startswith("qwen-image-edit") and find_spec("torchvision") is None:
        pytest.skip("the processor of Qwen-Image-Edit takes torchvision, which is not installed")
    return found


@pytest.fixture
def where(task: PictureTask, tiny: Any, tmp_path: Path) -> StageContext:
    return context(tiny(task.case), tmp_path)


def pixels(where: StageContext, result: StageResult) -> np.ndarray[Any, Any]:
    png = ArtifactStore(where.store_url).read(result.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_through_artifacts_equal_the_unsplit_pipeline(
    task: PictureTask, where: StageContext, dtype: str
) -> None:
    _, image = chain(task, where, dtype=dtype)
    expected = run_whole(
        task.case.family,
        Path(where.model_dir),
        {**task.arguments, "output_type": "pil"},
        seed=7,
        dtype=getattr(torch, dtype),
        guidance=task.case.guidance,
    )[0]
    assert np.array_equal(pixels(where, image), np.asarray(expected))


def test_a_job_in_a_batch_has_the_bits_it_has_alone(task: PictureTask, where: StageContext) -> None:
    """One process does a batch's requests one by one; nothing of one is left in the next."""
    embeds = task.stage(where, "encode")
    image = task.media["image"]
    size = (image[0] if isinstance(image, list) else image).size
    other = {**task.media, "image": picture(2, *size)}
    first = task.stage(where, "condition")
    second = task.stage(where, "condition", media=other)
    assert second != first
    assert task.stage(where, "condition") == first
    alone = task.stage(where, "denoise", embeds, first, seed=7)
    assert task.stage(where, "denoise", embeds, second, seed=7) != alone
    assert task.stage(where, "denoise", embeds, first, options={"num_inference_steps": 5}) != alone
    assert task.stage(where, "denoise", embeds, first, seed=7) == alone


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the stage's own code runs after it."""


class KilledAtItsSecondStep(Heard):
    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        super().progress(activity, step, num_steps, message)
        if (activity, step) == ("running", 2):
            raise Killed


def test_a_killed_denoise_ends_with_the_undisturbed_bits(
    task: PictureTask, where: StageContext
) -> None:
    """Noise, image latents and masks are made again, the loop goes on where it was."""
    given = task.stage(where, "encode"), task.stage(where, "condition")
    steps = {"options": {"num_inference_steps": 8}}
    undisturbed = where.model_copy(update={"checkpoint_every_s": None})
    expected = task.stage(undisturbed, "denoise", *given, **steps)
    where = where.model_copy(update={"checkpoint_every_steps": 1})
    asked = task.request(where, "denoise", *given, **steps)
    with pytest.raises(Killed):
        handler_for("denoise")(asked, where, KilledAtItsSecondStep())
    result, report, heard = run_stage(asked, where)
    assert result == expected
    assert report["resumed_from_step"] in (1, 2)
    assert heard.steps[-1][1] == heard.steps[-1][2]


def test_what_a_picture_becomes_depends_on_no_prompt(
    task: PictureTask, where: StageContext
) -> None:
    """So that another prompt encodes no picture again, and another picture no prompt."""
    made = run_stage(request("inspect", {}, family=task.case.name, task=task.name), where)[0]
    manifest = Manifest.model_validate_json(ArtifactStore(where.store_url).read(made.only()))
    assert manifest.phases["condition"].inputs == ()
    assert manifest.phases["condition"].task == task.name
    assert manifest.phases["encode"].task == next(iter(task.case.family.tasks))
    assert task.shares_text == ("image" not in manifest.phases["encode"].options)


def test_a_seed_is_drawn_from_exactly_where_the_family_says(
    task: PictureTask, where: StageContext
) -> None:
    assert task.draws == ("condition" in task.case.family.drawing)
    store = ArtifactStore(where.store_url)
    with_seed = {n: task.stage(where, "condition", seed=n) for n in (1, 2)}
    held = [unpack(store.path(each.only())).handover.values for each in with_seed.values()]
    assert task.draws != _equal(*held)
    if task.draws:
        with pytest.raises(StageFailed, match=r"condition phase of .* drew random numbers"):
            task.stage(where, "condition", seed=None)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_unet_made_for_inpainting_equals_the_unsplit_pipeline(tmp_path: Path, dtype: str) -> None:
    """It takes the mask and the masked picture as channels beside the latents."""
    task = TASKS["sdxl inpaint"]
    where = context(tiny_editors.sdxl_inpaint(tmp_path / "model"), tmp_path)
    _, image = chain(task, where, dtype=dtype)
    expected = run_whole(
        task.case.family,
        Path(where.model_dir),
        {**task.arguments, "output_type": "pil"},
        seed=7,
        dtype=getattr(torch, dtype),
        guidance=task.case.guidance,
    )[0]
    assert np.array_equal(pixels(where, image), np.asarray(expected))


def test_what_is_painted_in_part_keeps_the_rest_to_the_bit(tiny: Any, tmp_path: Path) -> None:
    task = TASKS["sdxl inpaint cropped"]
    where = context(tiny(task.case), tmp_path)
    _, image = chain(task, where)
    painted, given = pixels(where, image), np.asarray(task.media["image"])
    kept = np.asarray(task.media["mask_image"]) == 0
    assert painted.shape == given.shape
    assert np.array_equal(painted[kept], given[kept])
    assert not np.array_equal(painted[~kept], given[~kept])


def test_pixels_that_are_laid_over_a_picture_are_checked_before(tiny: Any, tmp_path: Path) -> None:
    """A finished picture of NaN would be black, and nobody could tell."""
    task = TASKS["sdxl inpaint cropped"]
    model_dir = Path(shutil.copytree(tiny(task.case), tmp_path / "model"))
    path = model_dir / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_out.bias"].fill_(float("nan"))
    save_file(tensors, path)
    with pytest.raises(BorderError, match=r"decode: sample .* has .* NaN"):
        chain(task, context(model_dir, tmp_path))


def test_a_condition_without_a_picture_is_an_error(task: PictureTask, where: StageContext) -> None:
    with pytest.raises(
        RequestError, match="starts from a picture, video or sound, but the request"
    ):
        task.stage(where, "condition", media={})

"""Flows that start from pictures: the task, the checks, what runs and what is found again."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flows.from_pictures import Start, check_references, check_start, size_warning
from stages.errors import RequestError
from stages.families import family_named
from stages.media import read_settings
from stages.models import MINIATURE
from tests.support.judge import judge
from tests.support.picture_tasks import TASKS, mask, picture, saved
from tests.support.studio import Studio

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # diffusers' Euler scheduler, in the whole run that flows are compared with
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

ALIKE = {
    "z-image image-to-image",  # above
    *("sdxl inpaint", "qwen-image inpaint cropped"),
}
"""Tasks whose flow has the wiring of another one's that is run."""

WITHOUT = {"height": None, "width": None}


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[Any]:
    """One fork server for the module, which serves every family."""
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    for task in TASKS.values():
        made.expect(task.case.name)
    process = made.start("inspect", logging.getLogger("test"), lambda: False)
    process.release()  # the fork server is there from here on, before any test looks
    yield made
    made.close()
    shared_launcher.cache_clear()


@pytest.fixture
def studio(tiny: Any, home: Path, tmp_path: Path, launcher: Any) -> Studio:
    model_dir = tiny(TASKS["z-image image-to-image"].case)
    return Studio(model_dir, home, tmp_path / "pictures", launcher)


def test_each_part_of_a_run_from_a_picture_is_computed_once(studio: Studio, tmp_path: Path) -> None:
    import torch

    from tests.support.whole_run import run_whole

    path = saved(picture(1), tmp_path / "a.png")
    text = {"negative_prompt": "blurry", "guidance_scale": 3.0, "num_inference_steps": 4}
    studio.paint(**text)  # the prompt alone: its embedding serves from here on
    first = studio.paint(**text, image=str(path), strength=0.6)
    assert first.ran == {"inspect": 1, "condition": 1, "denoise": 1, "decode": 1}
    assert first.started == {"inspect": 1, "condition": 1, "denoise": 1, "decode": 1}
    arguments = TASKS["z-image image-to-image"].arguments
    whole = run_whole(
        family_named("z-image"),
        studio.model,
        {**arguments, "output_type": "pil"},
        seed=7,
        dtype=torch.float32,
        guidance={"guider": 3.0},
    )
    assert np.array_equal(first.pixels[0], np.asarray(whole[0]))

    renamed = saved(picture(1), tmp_path / "another name.bmp")
    again = studio.paint(**text, image=str(renamed), strength=0.6)
    assert not again.started
    assert np.array_equal(again.pixels[0], first.pixels[0])

    changed = picture(1)
    changed.putpixel((5, 5), (0, 0, 0))
    other = studio.paint(**text, image=str(saved(changed, path)), strength=0.6)
    assert other.ran == {"condition": 1, "denoise": 1, "decode": 1}

    prompt = studio.paint(**text, image=str(path), strength=0.7, prompt="a robot")
    assert prompt.ran == {"encode": 1, "denoise": 1, "decode": 1}

    strength = studio.paint(**text, image=str(path), strength=0.4)
    assert strength.ran == {"denoise": 1, "decode": 1}
    settings = read_settings(strength.files[0])
    assert settings is not None
    assert settings.strength == 0.4
    assert "condition.condition" in settings.artifacts


def test_several_seeds_and_prompts_from_a_picture_equal_each_one_apart(
    studio: Studio, tmp_path: Path
) -> None:
    path = str(saved(picture(1), tmp_path / "a.png"))
    both = studio.paint(prompt=["a small red fox", "a robot"], num_images=2, image=path)
    assert both.ran == {"inspect": 1, "encode": 2, "condition": 2, "denoise": 4, "decode": 4}
    assert both.started["condition"] == 1
    apart = [
        studio.paint(prompt=prompt, seed=seed, image=path, fresh=True).pixels[0]
        for prompt, seed in (("a small red fox", 8), ("a robot", 7))
    ]
    assert np.array_equal(both.pixels[1], apart[0])
    assert np.array_equal(both.pixels[2], apart[1])


def test_the_miniature_keeps_a_scene_at_low_strength_and_follows_the_prompt_at_high(
    home: Path, tmp_path: Path, launcher: Any
) -> None:
    from stages.miniature.captions import parse
    from stages.miniature.draw import draw
    from stages.miniature.grammar import place

    there, wanted = parse("a red circle on a white background"), parse("a blue square")
    drawn = saved(draw(place(there, Random(1))), tmp_path / "scene.png")
    studio = Studio(MINIATURE, home, tmp_path / "pictures", launcher)
    job = {"image": str(drawn), "num_inference_steps": None, **WITHOUT, "seed": 3}
    kept = studio.paint(prompt="a red circle on a white background", strength=0.3, **job)
    found = judge(Image.open(kept.files[0]), there)
    assert found.ok, found.problems
    anew = studio.paint(prompt="a blue square", strength=1.0, **job)
    assert judge(Image.open(anew.files[0]), wanted).ok
    assert not judge(Image.open(anew.files[0]), there).ok


# ---- before anything runs ------------------------------------------------------------------


def start(family: str, **arguments: Any) -> Start:
    given = {"image": None, "mask_image": None, "strength": None, "allow_urls": False}
    return check_start(family_named(family), **given | arguments)


def test_the_task_follows_from_what_is_given(tmp_path: Path) -> None:
    image = str(saved(picture(1), tmp_path / "a.png"))
    white = str(saved(mask(), tmp_path / "m.png"))
    assert start("sdxl").task == "text-to-image"
    assert start("sdxl", image=image).task == "image-to-image"
    assert start("sdxl", image=image, mask_image=white).task == "inpaint"
    assert start("flux2-klein", image=image).task == "edit"
    assert start("sdxl", image=image).strength == 0.6
    assert start("sdxl", image=image, mask_image=white).strength == 1.0
    assert start("flux2-klein", image=image).strength is None
    several = start("flux2-klein", image=[image, image])
    assert len(several.media["image"]) == 2
    assert set(start("sdxl", image=image, mask_image=white).media) == {"image", "mask_image"}


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("sdxl", {"strength": 0.5}, "strength belongs to a picture; give image, too"),
        ("sdxl", {"mask_image": "m.png"}, "mask_image belongs to a picture; give image, too"),
        ("sdxl", {"image": "a.png", "padding_mask_crop": 8}, "padding_mask_crop belongs to a mask"),
        ("sdxl", {"mask_image": "m.png", "padding_mask_crop": -1}, "is -1 pixels, allowed are 0"),
        ("qwen-image-edit", {}, "qwen-image-edit edits a picture; give image"),
        ("sd3", {"image": "a.png", "mask_image": "m.png"}, "sd3 has no task inpaint; its tasks"),
        ("sdxl", {"image": "missing.png"}, r"image missing\.png does not exist"),
        ("sdxl", {"image": ["a.png", "a.png"]}, "image holds 2 pictures, but image-to-image of"),
        ("flux2-klein", {"image": ["a.png"] * 9}, "image holds 9 pictures, allowed are 1 to 8"),
        ("flux2-klein", {"image": []}, "image holds 0 pictures"),
        ("sdxl", {"image": "a.png", "strength": 0}, "strength is 0, which would leave the"),
        ("sdxl", {"image": "a.png", "strength": 1.5}, "strength is 1.5, allowed are 0 to 1"),
        ("sdxl", {"image": "a.png", "mask_image": "small.png"}, "is 8 x 8 pixels, but image is 64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    given: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(picture(1), Path("a.png"))
    saved(mask(), Path("m.png"))
    saved(mask(8), Path("small.png"))
    with pytest.raises(RequestError, match=message):
        start(family, **given)


def test_a_model_for_inpainting_takes_a_mask(home: Path, tmp_path: Path) -> None:
    from flows.sdxl import check
    from tests.support import tiny_editors

    model = str(tiny_editors.sdxl_inpaint(tmp_path / "repainter"))
    given = {"prompt": "a fox", "model": model, "output": str(tmp_path), "device": "cpu"}
    image, white = (
        str(saved(one, tmp_path / n)) for one, n in ((picture(1), "a.png"), (mask(), "m.png"))
    )
    with pytest.raises(RequestError, match="repainter was made for inpainting; give image and"):
        check(**given, image=image)
    job = check(**given, image=image, mask_image=white, padding_mask_crop=4)
    assert job.start.task == "inpaint"


def checked(studio: Studio, tmp_path: Path, **arguments: Any) -> Any:
    from flows.z_image import check

    given = {"prompt": "a fox", "model": str(studio.model), "output": str(tmp_path / "out")}
    return check(**given | {"device": "cpu"} | arguments)


def test_the_size_follows_the_picture(studio: Studio, tmp_path: Path) -> None:
    small = str(saved(picture(1, 70, 41), tmp_path / "small.png"))
    job = checked(studio, tmp_path, image=small)
    assert (job.height, job.width) == (48, 64)
    job = checked(studio, tmp_path, image=small, width=128)
    assert (job.height, job.width) == (80, 128)
    large = str(saved(picture(1, 400, 100), tmp_path / "large.png"))
    job = checked(studio, tmp_path, image=large)
    assert (job.height, job.width) == (32, 128)
    assert job.warnings[-1].startswith("image is 400 x 100 pixels and is painted at 128 x 32")
    job = checked(studio, tmp_path, image=large, height=64, width=64)
    assert "is stretched to 64 x 64" in job.warnings[-1]
    with pytest.raises(RequestError, match="width 50 is not a multiple of 16 pixels, use 48 or 64"):
        checked(studio, tmp_path, image=small, width=50)


@pytest.mark.parametrize("size", [(1000, 700), (64, 64), (3000, 900), (333, 1000), (1024, 1023)])
def test_an_edit_has_by_default_the_size_in_which_its_pipeline_sees_the_picture(
    size: tuple[int, int],
) -> None:
    """In another one, what is kept would shift."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    from flows import flux_kontext, qwen_image_edit

    assert set(flux_kontext.SIZES) == set(PREFERRED_KONTEXT_RESOLUTIONS)
    height, width = flux_kontext.taught_size(*size)
    aspects = {abs(size[0] / size[1] - w / h): (w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS}
    assert (width, height) == aspects[min(aspects)]
    height, width = qwen_image_edit.taught_size(*size)
    assert (width, height) == calculate_dimensions(1024 * 1024, size[0] / size[1])[:2]


def test_too_few_steps_for_the_strength_are_refused(studio: Studio, tmp_path: Path) -> None:
    image = str(saved(picture(1), tmp_path / "a.png"))
    with pytest.raises(RequestError, match=r"0 denoising steps \(3 x 0.2\); raise num_infer"):
        checked(studio, tmp_path, image=image, num_inference_steps=3, strength=0.2)


def test_a_strength_at_which_the_picture_has_no_effect_is_told(
    studio: Studio, tmp_path: Path
) -> None:
    """Seen in the bits: at these settings, every picture gives the same latents."""
    image = str(saved(picture(1), tmp_path / "a.png"))
    some = {"image": image, "num_inference_steps": 3}
    (warning,) = checked(studio, tmp_path, **some, strength=0.7).warnings
    assert warning.startswith(
        "strength 0.7 of 3 steps starts from noise alone: image has no effect"
    )
    assert not checked(studio, tmp_path, **some, strength=0.6).warnings
    made = [
        studio.paint(image=str(saved(picture(n), tmp_path / f"{n}.png")), strength=strength)
        for strength in (0.7, 0.6)
        for n in (1, 2)
    ]
    assert np.array_equal(made[0].pixels[0], made[1].pixels[0])
    assert not np.array_equal(made[2].pixels[0], made[3].pixels[0])


def test_a_file_is_told_of_what_is_not_used(studio: Studio, tmp_path: Path) -> None:
    frames = [picture(n) for n in range(2)]
    path = saved(frames[0], tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    job = checked(studio, tmp_path, image=str(path))
    assert any("has 2 frames; the first one is used" in each for each in job.warnings)


def test_a_web_address_takes_the_setting(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="unless EXEUNT_ALLOW_URLS=1 is set"):
        checked(studio, tmp_path, image="http://127.0.0.1:9/x.png")
    monkeypatch.setenv("EXEUNT_ALLOW_URLS", "1")
    with pytest.raises(RequestError, match="a private network"):
        checked(studio, tmp_path, image="http://127.0.0.1:9/x.png")


def test_a_run_from_a_prompt_alone_loads_no_picture_library() -> None:
    """`flows.from_pictures` is on every run's way; Pillow costs a tenth of a second."""
    import subprocess
    import sys

    code = "import sys, flows.from_pictures; print('PIL.Image' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_picture_that_is_edited_is_not_said_to_be_stretched() -> None:
    assert not size_warning(Start(task="edit", size=(64, 64)), 64, 512, is_asked=True)
    assert not size_warning(Start(), 64, 512, is_asked=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(64, 32)], "image is 64 x 32 pixels, allowed are edges of 64 and more; enlarge it"),
        ([(64, 64), (64, 513)], "image 2 of 2 is 64 x 513 pixels, allowed are 8 times as wide"),
        ([(64, 64)] * 3, "image holds 3 pictures, allowed are 2 with this model"),
    ],
)
def test_references_are_held_to_what_a_pipeline_takes(
    sizes: list[tuple[int, int]], message: str
) -> None:
    images = [Image.new("RGB", size) for size in sizes]
    given = Start(task="edit", media={"image": images if len(images) > 1 else images[0]})
    with pytest.raises(RequestError, match=message):
        check_references(given, most=2, least_edge=64, most_aspect=8)
    check_references(given, most=3)


# ---- every family's flow -------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(TASKS) - ALIKE))
def test_the_flow_of_a_task_equals_the_unsplit_pipeline(
    name: str, tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    import torch

    from flows.cli import FAMILIES
    from tests.support.whole_run import run_whole

    task = TASKS[name]
    if task.case.name.startswith("qwen-image-edit") and find_spec("torchvision") is None:
        pytest.skip("the processor of Qwen-Image-Edit takes torchvision, which is not installed")
    module = importlib.import_module(FAMILIES[task.case.command or task.case.name][0])
    flow = getattr(module, module.__name__.rpartition(".")[2])
    own = {"max_area": 64 * 64} if "max_area" in task.options else {}  # which the flow sets
    arguments = {k: v for k, v in task.arguments.items() if k in flow.fn.__annotations__}
    paths = {key: written(medium, tmp_path / key) for key, medium in task.media.items()}
    scale = {} if task.case.scale is None else {"guidance_scale": task.case.scale}
    places = {"model": str(tiny(task.case)), "output": str(tmp_path / "made"), "device": "cpu"}
    (made,) = flow(**arguments | paths | scale | places, seed=7)
    whole = run_whole(
        task.case.family,
        tiny(task.case),
        {**task.case.options["encode"], **arguments, **own, "output_type": "pil"},
        seed=7,
        dtype=torch.float32,
        guidance=task.case.guidance,
    )
    with Image.open(made.path) as picture_made:
        assert np.array_equal(np.asarray(picture_made), np.asarray(whole[0]))


def written(medium: Any, path: Path) -> Any:
    """A medium as the flow's argument: a path, or several."""
    if isinstance(medium, list):
        return [written(each, path.with_name(f"{path.name}{n}")) for n, each in enumerate(medium)]
    return str(saved(medium, path.with_suffix(".png")))

"""Each family's flow from the command line's arguments to pictures, in real stage processes."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flows.cli import FAMILIES
from flows.cli_arguments import argument_texts
from stages.errors import ModelError, RequestError
from tests.support.tiny_families import CASES, PROMPT, Case

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # diffusers' Euler scheduler, in the whole run that flows are compared with
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

FIXED = {"clean_caption"}
"""Arguments of pipelines that their flows give themselves."""

NEW = [name for name in sorted(CASES) if name != "z-image"]  # test_z_image.py has that one
UNLIKE = [name for name in NEW if name not in ("pixart", "sana")]
"""Families whose runs differ by more than their declarations: those two go the way of sd15."""


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[Any]:
    """One fork server for the module, which serves every family."""
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    for name in NEW:
        made.expect(name)
    process = made.start("inspect", logging.getLogger("test"), lambda: False)
    process.release()  # the fork server is there from here on, before any test looks
    yield made
    made.close()
    shared_launcher.cache_clear()


def flow_module(name: str) -> Any:
    return importlib.import_module(FAMILIES[CASES[name].command or name][0])


def flow_of(name: str) -> Any:
    module = flow_module(name)
    return getattr(module, module.__name__.rpartition(".")[2])


def arguments(case: Case, model_dir: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """The job of a case as the flow's arguments."""
    found: dict[str, Any] = {"prompt": PROMPT, "model": str(model_dir), "seed": 7}
    found |= {name: value for options in case.options.values() for name, value in options.items()}
    found = {name: value for name, value in found.items() if name not in FIXED}
    if case.scale is not None:
        found["guidance_scale"] = case.scale
    return found | {"device": "cpu", "output": str(output)} | changes


def pixels(pictures: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [read(picture.path) for picture in pictures]


def read(path: str) -> np.ndarray[Any, Any]:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.parametrize("name", NEW)
def test_pixels_equal_the_one_process_modular_run(
    name: str, tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    import torch

    from tests.support.whole_run import run_whole

    case = CASES[name]
    before = Counter(launcher.num_processes_started)
    made = flow_of(name)(**arguments(case, tiny(case), tmp_path / "pictures"))
    every = {key: value for options in case.options.values() for key, value in options.items()}
    whole = run_whole(
        case.family,
        tiny(case),
        {**every, "output_type": "pil"},
        seed=7,
        dtype=torch.float32,
        guidance=case.guidance,
    )
    assert np.array_equal(pixels(made)[0], np.asarray(whole[0]))
    started = Counter(launcher.num_processes_started) - before
    assert started == {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}


@pytest.mark.parametrize("name", UNLIKE)
def test_seeds_and_prompts_together_equal_each_one_apart(
    name: str, tiny: Any, home: Path, tmp_path: Path
) -> None:
    flow, case = flow_of(name), CASES[name]
    both = {"prompt": [PROMPT, "a robot"], "num_images": 2}
    together = pixels(flow(**arguments(case, tiny(case), tmp_path / "together", **both)))
    apart = [
        pixels(
            flow(
                **arguments(
                    case, tiny(case), tmp_path / "apart", prompt=prompt, seed=seed, fresh=True
                )
            )
        )[0]
        for prompt in both["prompt"]
        for seed in (7, 8)
    ]
    assert all(np.array_equal(one, other) for one, other in zip(together, apart, strict=True))
    assert len({one.tobytes() for one in together}) == 4


@pytest.mark.parametrize("name", UNLIKE)
def test_the_same_request_again_starts_no_process(
    name: str, tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    flow, case = flow_of(name), CASES[name]
    first = pixels(flow(**arguments(case, tiny(case), tmp_path)))
    before = Counter(launcher.num_processes_started)
    again = pixels(flow(**arguments(case, tiny(case), tmp_path)))
    assert Counter(launcher.num_processes_started) == before
    assert np.array_equal(first[0], again[0])


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"height": 100}, r"height 100 is not a multiple of (8|16) pixels, use 96 or (104|112)"),
    ({"num_inference_steps": 0}, "0 denoising steps"),
    ({"guidance_scale": -1.0}, "guidance_scale is -1"),
    ({"seed": -2}, "seed is -2"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"dtype": "fp 16"}, "fp 16"),
    ({"device": "tpu"}, "tpu"),
    ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ({"model": "miniature"}, "is a ZImagePipeline, but .* takes .*; it is one of z-image"),
    ({"max_sequence_length": 0}, "max_sequence_length is 0 tokens, allowed are 1 to"),
    ({"max_sequence_length": 5000}, "max_sequence_length is 5000 tokens, allowed are 1 to"),
]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(("bad", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_is_named_before_any_process_starts(
    name: str, tiny: Any, home: Path, tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    taken = inspect.signature(flow_of(name).fn).parameters
    if not set(bad) <= set(taken):
        pytest.skip(f"{name} has no argument {min(bad)}")
    given = arguments(CASES[name], tiny(CASES[name]), tmp_path, num_images=1, height=64, width=64)
    with pytest.raises((RequestError, ModelError), match=message):
        flow_module(name).check(**given | bad)


@pytest.mark.parametrize("name", NEW)
def test_a_size_is_by_default_what_the_model_was_trained_at(
    name: str, tiny: Any, home: Path, tmp_path: Path
) -> None:
    given = arguments(CASES[name], tiny(CASES[name]), tmp_path, height=None, width=None)
    job = flow_module(name).check(**given)
    assert job.height == job.width == CASES[name].trained_at


@pytest.mark.parametrize("name", NEW)
def test_every_argument_is_explained(name: str) -> None:
    function = flow_of(name).fn
    texts = argument_texts(function)
    assert set(texts) == set(inspect.signature(function).parameters)
    assert all(texts.values())


def as_option(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={value}"


@pytest.mark.parametrize("name", NEW)
def test_the_command_line_paints_and_tells_of_it(
    name: str,
    tiny: Any,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flows import cli_family
    from flows.cli import main
    from flows.launch import Launcher

    # The command closes the launcher that it starts early; the module's one goes on.
    monkeypatch.setattr(cli_family, "shared_launcher", lambda method: Launcher("spawn"))
    given = arguments(CASES[name], tiny(CASES[name]), tmp_path / "pictures")
    line = [as_option(key, value) for key, value in given.items()]
    assert main([CASES[name].command or name, *line, "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (picture,) = last["pictures"]
    assert read(picture["path"]).shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("name", "steps", "guidance"), [("flux2-klein", 4, None), ("flux2-klein-base", 50, 4.0)]
)
def test_a_klein_model_is_distilled_or_not_by_its_index(
    name: str, steps: int, guidance: float | None, tiny: Any, home: Path, tmp_path: Path
) -> None:
    given = arguments(CASES[name], tiny(CASES[name]), tmp_path)
    blank = dict.fromkeys(("num_inference_steps", "guidance_scale"))
    job = flow_module(name).check(**given | blank)
    assert job.family.name == name
    assert (job.num_inference_steps, job.guidance_scale) == (steps, guidance)


def test_a_pixart_model_without_a_list_of_sizes_cannot_choose_among_them(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    given = arguments(CASES["pixart"], tiny(CASES["pixart"]), tmp_path)
    with pytest.raises(RequestError, match=r"needs a model of 32, 64, 128, 256 .* has 8; give"):
        flow_module("pixart").check(**given | {"use_resolution_binning": True})


def warnings_of(run: Any) -> list[str]:
    from flows.display import LineDisplay, showing

    heard = io.StringIO()
    with showing(LineDisplay(heard)):
        run()
    return [line for line in heard.getvalue().splitlines() if "warning" in line]


def test_a_schnell_model_has_its_own_defaults_and_takes_no_guidance(
    home: Path, tmp_path: Path
) -> None:
    from flows.flux import check, flux
    from tests.support import tiny_models

    schnell = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    given: dict[str, Any] = arguments(CASES["flux"], schnell, tmp_path / "pictures")
    blank = dict.fromkeys(("num_inference_steps", "max_sequence_length"))
    job = check(**given | blank | {"num_images": 1})
    assert (job.num_inference_steps, job.max_sequence_length) == (4, 256)
    assert job.guidance_scale is None
    told = warnings_of(lambda: flux(**given | blank))
    assert any("guidance_scale has no effect: schnell takes none" in line for line in told)

"""Previews: small pictures of where a loop is going, which change no bit and stop no loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from stages.contracts import StageContext, StageResult
from stages.previews import (
    LONG_EDGE,
    Previews,
    clean_latents,
    read_latent_rgb,
    to_picture,
    unpacked,
)
from tests.support.chain import Heard, context, request
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES, VideoCase

pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

SHAPES = ["flux", "sd15", "z-image", "wan", "ltx", "cogvideox"]
"""Families of latents that are packed, spread, of a classic pipeline, and of videos."""


class Seen(Heard):
    """Looks at each preview when it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[tuple[int, Image.Image]] = []

    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        super().progress(activity, step, num_steps, message)
        if activity == "preview":
            with Image.open(message) as picture:
                picture.load()
                self.pictures.append((step, picture))


def denoise(case: Case | VideoCase, where: StageContext) -> tuple[StageResult, Seen]:
    from stages.worker import handler_for

    heard, results = Seen(), list[StageResult]()
    for stage in ("encode", "denoise"):
        asked = request(
            stage,
            case.requests[stage],
            *results,
            family=case.name,
            task=next(iter(case.family.tasks)),
            seed=7 if stage == "denoise" else None,
        )
        results.append(handler_for(stage)(asked, where, heard)[0])
    return results[-1], heard


@pytest.mark.parametrize("name", SHAPES)
def test_a_preview_shows_the_loop_and_changes_no_bit(name: str, tiny: Any, tmp_path: Path) -> None:
    case: Case | VideoCase = {**CASES, **VIDEO_CASES}[name]
    plain, quiet = denoise(case, context(tiny(case), tmp_path / "plain"))
    folder = tmp_path / "run" / "previews"
    where = context(tiny(case), tmp_path / "shown", preview_every_steps=2, preview_dir=str(folder))
    shown, heard = denoise(case, where)
    assert shown.artifacts == plain.artifacts
    assert not quiet.pictures
    assert heard.warnings == quiet.warnings
    assert [step for step, _ in heard.pictures] == [2]
    (_, picture) = heard.pictures[0]
    num_frames = 2 if isinstance(case, VideoCase) else 1
    assert picture.size == (num_frames * LONG_EDGE, LONG_EDGE)
    assert len(set(picture.convert("L").tobytes())) > 8, "it is no empty picture"
    assert list(folder.iterdir()) == [], "a preview goes when the result is there"


# ---- one preview ---------------------------------------------------------------------------


def previews(path: Path, told: list[Any], **changes: Any) -> Previews:
    usual: dict[str, Any] = {
        "every_steps": 3,
        "grid": None,
        "latent_channels": None,
        "on_picture": lambda *about: told.append(about),
        "warn": told.append,
    }
    return Previews(path, **usual | changes)


def test_it_comes_every_few_steps_under_one_name_and_not_after_the_last(tmp_path: Path) -> None:
    told: list[Any] = []
    path = tmp_path / "a" / "b.jpg"
    made = previews(path, told)
    for step in range(1, 10):
        latents = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(step))
        made.step_done(step, 9, None, SimpleNamespace(latents=latents))
    assert told == [(3, 9, str(path)), (6, 9, str(path))]
    assert list(path.parent.iterdir()) == [path]
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("JPEG", (LONG_EDGE, LONG_EDGE // 2))
    made.clear()
    assert not path.exists()
    made.clear()


@pytest.mark.parametrize(
    ("latents", "reason"),
    [
        (None, "the loop carries no latents"),
        (torch.zeros(1, 7, 4), "7 tokens are no frames of 2 x 2"),
        (torch.full((1, 4, 8, 8), torch.nan), "the latents are not finite"),
    ],
)
def test_what_cannot_be_shown_is_told_once_and_the_loop_goes_on(
    tmp_path: Path, latents: Any, reason: str
) -> None:
    told: list[Any] = []
    made = previews(tmp_path / "a.jpg", told, every_steps=1, grid=(2, 2))
    for step in (1, 2, 3):
        made.step_done(step, 9, None, SimpleNamespace(latents=latents))
    (message,) = told
    assert message == f"no preview can be made: {reason}; denoising goes on without"


def test_a_folder_that_cannot_be_written_stops_no_loop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[Any] = []
    made = previews(tmp_path / "file" / "a.jpg", told, every_steps=1)
    made.step_done(1, 9, None, SimpleNamespace(latents=torch.randn(1, 4, 8, 8)))
    assert len(told) == 1 and "no preview can be made" in told[0]


# ---- what it shows -------------------------------------------------------------------------


def test_a_schedulers_line_is_followed_to_its_clean_end() -> None:
    import diffusers

    clean, noise = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    sigma = scheduler.sigmas[2]
    state = SimpleNamespace(latents=(1 - sigma) * clean + sigma * noise, noise_pred=noise - clean)
    pipe = SimpleNamespace(scheduler=scheduler)
    assert torch.allclose(clean_latents(pipe, state, 2), clean, atol=1e-5)
    state.noise_pred = noise[:, :2]
    assert torch.equal(clean_latents(pipe, state, 2), state.latents)
    assert torch.equal(clean_latents(None, state, 2), state.latents)


def test_packed_latents_are_laid_out_as_their_pipeline_does_it() -> None:
    from diffusers import FluxPipeline

    spread = torch.randn(2, 16, 6, 8)
    packed = FluxPipeline._pack_latents(spread, 2, 16, 6, 8)
    assert torch.equal(unpacked(packed, (3, 4), 16), spread.unsqueeze(2))
    tokens = torch.randn(1, 2 * 3 * 4, 5)
    found = unpacked(tokens, (3, 4), 128)
    assert found.shape == (1, 5, 2, 3, 4)
    assert torch.equal(found[0, :, 1, 2, 3], tokens[0, -1])


def test_colours_come_of_the_models_own_numbers(tmp_path: Path) -> None:
    assert read_latent_rgb(tmp_path) is None
    for text in ("{", "{}", '{"latent_rgb": [[1, 2]]}', '{"latent_rgb": 5}'):
        (tmp_path / "exeunt.json").write_text(text)
        assert read_latent_rgb(tmp_path) is None
    (tmp_path / "exeunt.json").write_text('{"latent_rgb": [[1, 0, 0], [0, 0, 1], [0, 1, 0]]}')
    rgb = read_latent_rgb(tmp_path)
    assert rgb is not None
    latents = torch.stack([torch.ones(4, 4), -torch.ones(4, 4)])
    assert to_picture(latents, rgb).getpixel((9, 9)) == (255, 255, 0)
    with pytest.raises(ValueError, match="latent_rgb has 3 rows, but 3 channels take 4"):
        to_picture(torch.zeros(3, 4, 4), rgb)


def test_without_them_the_mean_of_the_channels_is_grey() -> None:
    latents = torch.zeros(3, 4, 4)
    latents[:, :, 2:] = 2.0
    picture = to_picture(latents)
    dark, light = picture.getpixel((0, 0)), picture.getpixel((LONG_EDGE - 1, 0))
    assert isinstance(dark, tuple) and isinstance(light, tuple)
    assert dark[0] < 100 and light[0] > 150
    assert len(set(dark)) == len(set(light)) == 1

"""Each video family's flow from the command line's arguments to an MP4, in real processes."""

from __future__ import annotations

import importlib
import inspect
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
from stages.errors import ModelError, RequestError, StageCrashed
from stages.media import read_settings
from tests.flows.test_resume import Killer
from tests.support import tiny_videos
from tests.support.chain import context, run_stage
from tests.support.video_cases import (
    NUM_FRAMES,
    PROMPT,
    TEXT_CASES,
    VIDEO_CASES,
    VideoCase,
    picture,
)
from tests.support.video_files import write_lossless

pytestmark = pytest.mark.usefixtures("prefect_server")

NAMES = sorted(VIDEO_CASES)


@pytest.fixture(scope="module", autouse=True)
def launcher() -> Iterator[Any]:
    """One fork server for the module, which serves every family."""
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    for name in NAMES:
        made.expect(VIDEO_CASES[name].name)
    process = made.start("inspect", logging.getLogger("test"), lambda: False)
    process.release()  # the fork server is there from here on, before any test looks
    yield made
    made.close()
    shared_launcher.cache_clear()


def flow_module(name: str) -> Any:
    return importlib.import_module(FAMILIES[VIDEO_CASES[name].command or VIDEO_CASES[name].name][0])


def flow_of(name: str) -> Any:
    module = flow_module(name)
    return getattr(module, module.__name__.rpartition(".")[2])


def saved(medium: Image.Image, path: Path) -> str:
    medium.save(path)
    return str(path)


def arguments(case: VideoCase, model_dir: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """The job of a case as the flow's arguments."""
    found: dict[str, Any] = {"prompt": PROMPT, "model": str(model_dir), "seed": 7}
    found |= {name: value for options in case.options.values() for name, value in options.items()}
    found |= {option: case.scales[guider] for guider, option in case.family.guidance.items()}
    for argument, medium in case.media.items():
        found |= kept(argument, medium, output.parent)
    found |= {"frame_rate": case.frame_rate, "device": "cpu", "output": str(output)}
    return found | changes


def kept(name: str, medium: Any, folder: Path) -> dict[str, Any]:
    """A pipeline's argument as a file, and what the flow calls it."""
    if name == "reference_images":
        return {"image": [saved(each, folder / f"{n}.png") for n, each in enumerate(medium)]}
    if isinstance(medium, list):
        path = write_lossless(medium, folder / f"{name}.mkv")
        return {"mask_video" if name == "mask" else name: str(path)}
    return {name: saved(medium, folder / f"{name}.png")}


@pytest.mark.parametrize("name", NAMES)
def test_a_flow_makes_the_video_of_the_one_process_run_and_finds_it_again(
    name: str, tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    import torch

    from stages.components import bind
    from stages.mp4 import encode_mp4, with_texts
    from stages.phases import split
    from stages.videos import frames, sound_of
    from tests.support.whole_run import run_whole

    case = VIDEO_CASES[name]
    before = Counter(launcher.num_processes_started)
    output = tmp_path / "videos"
    (made,) = flow_of(name)(**arguments(case, tiny(case), output))
    started = Counter(launcher.num_processes_started) - before
    assert started == dict.fromkeys(["inspect", *case.options], 1)
    whole = run_whole(
        case.family,
        tiny(case),
        {**case.arguments, "output_type": "pt"},
        seed=7,
        dtype=torch.float32,
        guidance=case.scales,
        output=list(case.family.products),
    )
    sound = None
    if case.family.sound:
        graph = split(case.family, case.task)
        pipe = bind(graph, "decode", tiny(case), dtype=torch.float32, device="cpu")
        sound = sound_of(case.family, pipe, whole[case.family.sound][0])
    expected = encode_mp4(frames(whole["videos"][0]), case.frame_rate, sound)
    settings = read_settings(made.path)
    comment = {"comment": settings.as_json()}
    assert Path(made.path).read_bytes() == with_texts(expected, comment)
    assert (settings.prompt, settings.seed, settings.family) == (PROMPT, 7, case.name)
    assert (settings.num_frames, settings.frame_rate) == (NUM_FRAMES, case.frame_rate)

    before = Counter(launcher.num_processes_started)
    (again,) = flow_of(name)(**arguments(case, tiny(case), output, embed_settings=False))
    assert Counter(launcher.num_processes_started) == before
    assert Path(again.path).read_bytes() == expected
    assert again.path == made.path.replace(".mp4", "-2.mp4")


def test_seeds_and_prompts_together_equal_each_one_apart(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    flow, case = flow_of("wan"), VIDEO_CASES["wan"]
    both = {"prompt": [PROMPT, "a robot"], "num_videos": 2}
    together = flow(**arguments(case, tiny(case), tmp_path / "together", **both))
    apart = [
        flow(
            **arguments(case, tiny(case), tmp_path / "apart", prompt=prompt, seed=seed, fresh=True)
        )[0]
        for prompt in both["prompt"]
        for seed in (7, 8)
    ]
    assert [each.digest for each in together] == [each.digest for each in apart]
    assert len({each.digest for each in together}) == 4


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"height": 101}, r"height 101 is not a multiple of \d+ pixels, use \d+ or \d+"),
    ({"num_frames": 10}, r"num_frames is 10, but .* [248]k\+1 frames, use 9 or 1[1-7]"),
    ({"num_frames": 0}, "num_frames is 0, but .*, use 1"),
    ({"num_frames": 8.5}, "num_frames is 8.5 "),
    ({"frame_rate": 0}, "frame_rate is 0 frames a second"),
    ({"frame_rate": 1000}, "frame_rate is 1000 frames a second, .* up to 240"),
    ({"num_frames": 10**8 + 1}, r"100000001 frames needs about .* choose a smaller size"),
    ({"num_inference_steps": 0}, "0 denoising steps"),
    ({"guidance_scale": -1.0}, "guidance_scale is -1"),
    ({"seed": -2}, "seed is -2"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ({"model": "miniature"}, "is a ZImagePipeline, but .* takes .*; it is one of z-image"),
]


@pytest.mark.parametrize("name", sorted(TEXT_CASES))
@pytest.mark.parametrize(("bad", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_named_before_any_process_starts(
    name: str,
    bad: dict[str, Any],
    message: str,
    tiny: Any,
    home: Path,
    tmp_path: Path,
    launcher: Any,
) -> None:
    case, before = VIDEO_CASES[name], Counter(launcher.num_processes_started)
    given = arguments(case, tiny(case), tmp_path / "videos")
    for argument in ("on_truncate", "embed_settings", "fresh", "vae_tiling"):
        given.pop(argument, None)
    with pytest.raises((RequestError, ModelError), match=message):
        flow_module(name).check(**given | bad)
    assert Counter(launcher.num_processes_started) == before
    assert not (tmp_path / "videos").exists() or not any((tmp_path / "videos").iterdir())


def test_settings_of_one_wan_are_refused_for_the_other(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    from flows.wan import check

    case = VIDEO_CASES["wan"]
    with pytest.raises(RequestError, match=r"guidance_scale_2 belongs to .* Wan 2\.2"):
        check(model=str(tiny(case)), prompt="a fox", guidance_scale_2=3.0)
    model, output = str(tiny(VIDEO_CASES["wan22"])), str(tmp_path)
    job = check(model=model, prompt="a fox", output=output)
    assert job.scales == {"guidance_scale": 4.0, "guidance_scale_2": 3.0}
    assert (job.height, job.width, job.num_frames, job.frame_rate) == (480, 832, 81, 16.0)


def test_a_model_that_cannot_start_as_asked_is_told_so(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    from flows.wan import check

    first, last = (saved(picture(n), tmp_path / f"{n}.png") for n in (1, 2))
    text, image = (str(tiny(VIDEO_CASES[name])) for name in ("wan", "wan-i2v from a picture"))
    newer = str(tiny(VIDEO_CASES["wan22-i2v from a picture"]))
    for arguments, message in (
        ({"model": text, "image": first}, "image has no use: .* tasks are text-to-video"),
        ({"model": image}, "this wan-i2v model starts from a picture; give image"),
        ({"model": image, "last_image": last}, "last_image belongs to a first one"),
        ({"model": newer, "image": first, "last_image": last}, "last_image has no use"),
        ({"model": image, "image": str(tmp_path / "none.png")}, "none.png"),
    ):
        with pytest.raises(RequestError, match=message):
            check(prompt="a fox", output=str(tmp_path), **arguments)


def test_a_video_has_the_form_of_its_picture_and_the_pixels_of_the_default(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    """What the pipeline of Wan computes of the video's own size is that size again."""
    from flows.wan import check

    model = str(tiny(VIDEO_CASES["wan-i2v from a picture"]))
    for size in ((900, 1600), (1600, 900), (500, 500), (3000, 1000)):
        image = saved(Image.new("RGB", size, (9, 99, 200)), tmp_path / "image.png")
        job = check(prompt="a fox", model=model, image=image, output=str(tmp_path))
        assert job.media["image"].size == (job.width, job.height)
        assert abs(job.width / job.height / (size[0] / size[1]) - 1) < 0.05
        assert abs(job.width * job.height / (480 * 832) - 1) < 0.05
        area, aspect = job.height * job.width, job.height / job.width
        assert round(np.sqrt(area * aspect)) // 16 * 16 == job.height
        assert round(np.sqrt(area / aspect)) // 16 * 16 == job.width
        assert not job.warnings
    wide = check(prompt="a", model=model, image=image, output=str(tmp_path), height=480, width=480)
    assert wide.media["image"].size == (480, 480)
    (sentence,) = wide.warnings
    assert "its middle is taken for a video of 480 x 480: 67 % are cut off" in sentence


def test_another_prompt_encodes_no_picture_again_and_a_seed_only_where_one_is_drawn(
    tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    for name, of_another_seed in (
        ("wan22-i2v from a picture", {"denoise", "decode"}),
        ("ltx from a picture", {"condition", "denoise", "decode"}),
    ):
        flow, case = flow_of(name), VIDEO_CASES[name]
        flow(**arguments(case, tiny(case), tmp_path / "videos"))
        for changes, expected in (
            ({"prompt": "a robot"}, {"encode", "denoise", "decode"}),
            ({"seed": 8}, of_another_seed),
        ):
            before = Counter(launcher.num_processes_started)
            flow(**arguments(case, tiny(case), tmp_path / "videos", **changes))
            assert set(Counter(launcher.num_processes_started) - before) == expected


def test_how_much_a_picture_is_compressed_is_checked(tiny: Any, home: Path) -> None:
    from flows.ltx2 import check

    rest = {"model": str(tiny(VIDEO_CASES["ltx2"])), "prompt": "a fox", "audio_guidance_scale": 1}
    for wrong in (-1, 52, 3.5):
        with pytest.raises(RequestError, match="image_crf is"):
            check(image_crf=wrong, **rest)


def test_a_wan_whose_vae_the_pipeline_would_misread_is_refused(home: Path, tmp_path: Path) -> None:
    from flows.wan import check

    model = tiny_videos.wan(tmp_path / "model")
    path = model / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_factor_spatial": 16}))
    with pytest.raises(ModelError, match=r"has scale 16, .* takes it for 8"):
        check(model=str(model), prompt="a fox")


def test_the_last_step_of_an_ltx_decoder_is_checked(tiny: Any, home: Path) -> None:
    from flows.ltx import check

    rest = {"model": str(tiny(VIDEO_CASES["ltx"])), "prompt": "a fox"}
    with pytest.raises(RequestError, match=r"decode_timestep is 1\.5, allowed are 0 to 1"):
        check(decode_timestep=1.5, decode_noise_scale=0.0, **rest)
    with pytest.raises(RequestError, match="decode_noise_scale"):
        check(decode_timestep=0.5, decode_noise_scale=-1, **rest)


@pytest.mark.parametrize("name", sorted(TEXT_CASES))
def test_the_command_line_says_what_each_argument_of_a_flow_means(name: str) -> None:
    function = flow_of(name).fn
    assert set(argument_texts(function)) == set(inspect.signature(function).parameters)


def test_what_a_video_is_made_along_has_to_fit_together(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    from flows.wan_vace import check

    case = VIDEO_CASES["wan22-vace"]
    frames = [picture(n) for n in range(12)]
    video = str(write_lossless(frames, tmp_path / "video.mkv", rate=24))
    mask = str(write_lossless(frames[:5], tmp_path / "mask.mkv"))
    rest = {"prompt": "a fox", "model": str(tiny(case)), "output": str(tmp_path)}
    for arguments, message in (
        ({}, "wan22-vace follows a video or pictures; give video, or image"),
        ({"mask_video": mask}, "mask_video belongs to a video"),
        ({"video": video, "num_frames": 13}, "num_frames is 13, but video has 12 frames; use 9"),
        ({"video": video, "num_frames": 6}, r"4k\+1 frames, use 5 or 9"),
        ({"video": video, "mask_video": mask}, "mask_video has 5 frames, but 9 of video are used"),
        ({"video": video, "height": 50}, "height 50 is not a multiple of 16"),
        ({"video": video, "conditioning_scale": -1.0}, "conditioning_scale is -1"),
        ({"image": ["a.png"] * 9}, "image holds 9 pictures, allowed are 8"),
    ):
        with pytest.raises(RequestError, match=message):
            check(**arguments, **rest)

    job = check(video=video, **rest)
    assert (job.num_frames, job.frame_rate) == (9, 24.0)
    assert job.height == job.width and len(job.media["video"]) == 9
    assert any("video goes on after 9 frames" in warning for warning in job.warnings)
    alone = check(image=[saved(picture(1), tmp_path / "a.png")], **rest)
    assert (alone.height, alone.width, alone.num_frames, alone.frame_rate) == (480, 832, 81, 16.0)


def test_a_vace_of_one_transformer_is_refused(home: Path, tmp_path: Path) -> None:
    import diffusers

    from flows.wan_vace import check

    model = tiny_videos.wan(tmp_path / "model", kind=diffusers.WanVACEPipeline)
    with pytest.raises(ModelError, match=r"has one transformer, as Wan 2\.1 VACE has"):
        check(prompt="a fox", model=str(model), image="a.png")


@pytest.mark.parametrize("name", ["wan22", "ltx2", "ltx from a picture"])
def test_a_loop_killed_by_the_system_ends_with_the_undisturbed_bits_in_a_new_process(
    name: str, tiny: Any, tmp_path: Path, launcher: Any
) -> None:
    """UniPC with its history and two transformers; two schedulers and two latents; Euler."""
    from flows.session import StageSession
    from tests.stages.test_video_families import asked, given

    case, steps = VIDEO_CASES[name], 16 if name == "ltx2" else 64  # none is done too soon
    options = {"num_inference_steps": steps}
    plain = context(tiny(case), tmp_path / "undisturbed")
    where = context(tiny(case), tmp_path / "killed", checkpoint_every_steps=1)
    expected, _, _ = run_stage(
        asked(case, plain, "denoise", *given(case, plain), options=options), plain
    )
    loop = asked(case, where, "denoise", *given(case, where), options=options)
    killer = Killer(5)  # it goes on for some steps until it dies
    with StageSession("denoise", launcher, on_event=killer) as session:
        with pytest.raises(StageCrashed, match="SIGKILL"):
            session.run(loop, where)
        result, report = session.run(loop, where)
    assert 5 <= report["resumed_from_step"] < steps
    assert report["steps"]["num_run"] == steps - report["resumed_from_step"]
    assert result == expected


def test_a_cogvideox_transformer_has_places_for_just_so_many_tokens(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    case = VIDEO_CASES["cogvideox"]
    given = arguments(case, tiny(case), tmp_path) | {"max_sequence_length": 31}
    with pytest.raises(
        RequestError, match=r"31 tokens, but the transformer of .* has places for 32"
    ):
        flow_module("cogvideox").check(**given)

"""Every family of videos through the one phase engine: equal bits, and MP4 files out of them."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch

from stages.artifacts import ArtifactStore
from stages.components import bind, renew_job_state
from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import BorderError, RequestError
from stages.handover import pack, unpack
from stages.manifest import Manifest
from stages.media_inputs import put_media
from stages.mp4 import encode_mp4
from stages.phases import Handover, run_phase, split
from stages.videos import frames, sound_of
from stages.worker import handler_for
from tests.stages.test_checkpoints import KillAt, Killed
from tests.support import tiny_videos
from tests.support.chain import context, request, run_stage
from tests.support.tiny_videos import SAMPLE_RATE
from tests.support.video_cases import NUM_FRAMES, TEXT_CASES, VIDEO_CASES, VideoCase, picture
from tests.support.whole_run import loaded_by_phase, run_whole

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=sorted(VIDEO_CASES))
def case(request: pytest.FixtureRequest) -> VideoCase:
    return VIDEO_CASES[request.param]


def whole(case: VideoCase, model_dir: Path, *, dtype: torch.dtype) -> Any:
    return run_whole(
        case.family,
        model_dir,
        {**case.arguments, "output_type": "pt"},
        seed=7,
        dtype=dtype,
        guidance=case.scales,
        output=list(case.family.products),
    )


def asked(
    case: VideoCase, where: StageContext, name: str, *inputs: StageResult, **changes: Any
) -> StageRequest:
    options = case.requests[name] | changes.pop("options", {})
    if name == "condition":
        inputs = (*inputs, put_media(ArtifactStore(where.store_url), case.media))
    if name == "denoise" or name in case.family.drawing:
        changes.setdefault("seed", 7)
    return request(name, options, *inputs, family=case.name, task=case.task, **changes)


def stage(
    case: VideoCase, where: StageContext, name: str, *inputs: StageResult, **changes: Any
) -> StageResult:
    return run_stage(asked(case, where, name, *inputs, **changes), where)[0]


def given(case: VideoCase, where: StageContext, **changes: Any) -> tuple[StageResult, ...]:
    """What the denoise phase starts from."""
    return tuple(stage(case, where, name, **changes) for name in list(case.options)[:-2])


def video_of(where: StageContext, result: StageResult) -> bytes:
    ref = result.artifacts["video-0"]
    assert ref.media_type == "video/mp4"
    return ArtifactStore(where.store_url).read(ref)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phases_in_sequence_equal_the_unsplit_pipeline(
    case: VideoCase, tiny: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Each phase gets what the one before it left in a file."""
    graph, handed, model_dir = split(case.family, case.task), Handover(), tiny(case)
    options = case.options
    assert list(graph.phases) == list(options)
    options["decode"]["output_type"] = "pt"
    for phase in graph.phases:
        pipe = bind(graph, phase, model_dir, dtype=dtype, device="cpu")
        renew_job_state(pipe, case.scales)
        seed = 7 if phase == "denoise" or phase in case.family.drawing else None
        if phase == "condition":
            options[phase] |= case.media
        handed = run_phase(graph, phase, pipe, options[phase], handed, seed=seed)
        if phase != "decode":
            path = tmp_path / phase
            path.write_bytes(pack(phase, handed, {}))
            handed = unpack(path).handover
    expected = whole(case, model_dir, dtype=dtype)
    assert handed.values["videos"].shape == (1, NUM_FRAMES, 3, case.edge, case.edge)
    for name in case.family.products:
        assert torch.equal(expected[name], handed.values[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_video_of_the_stages_is_that_of_the_unsplit_pipeline(
    case: VideoCase, tiny: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    where, name = context(tiny(case), tmp_path), str(dtype).removeprefix("torch.")
    latents = stage(case, where, "denoise", *given(case, where, dtype=name), dtype=name)
    made = video_of(where, stage(case, where, "decode", latents, dtype=name))
    expected = whole(case, tiny(case), dtype=dtype)
    sound = None
    if case.family.sound:
        graph = split(case.family, case.task)
        pipe = bind(graph, "decode", tiny(case), dtype=dtype, device="cpu")
        sound = sound_of(case.family, pipe, expected[case.family.sound][0])
    assert made == encode_mp4(frames(expected["videos"][0]), case.frame_rate, sound)


@pytest.mark.parametrize("case", TEXT_CASES.values(), ids=list(TEXT_CASES))
def test_a_player_sees_the_frames_at_their_rate_and_hears_the_sound(
    case: VideoCase, tiny: Any, tmp_path: Path
) -> None:
    where = context(tiny(case), tmp_path)
    latents = stage(case, where, "denoise", *given(case, where))
    made = video_of(where, stage(case, where, "decode", latents))
    with av.open(io.BytesIO(made)) as opened:
        video = opened.streams.video[0]
        assert (video.codec_context.name, video.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (video.width, video.height) == (case.edge, case.edge)
        assert video.average_rate == case.frame_rate
        seen = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    assert len(seen) == NUM_FRAMES
    expected = whole(case, tiny(case), dtype=torch.float32)
    painted = list(frames(expected["videos"][0]))
    assert np.abs(np.mean(seen, (0, 1, 2)) - np.mean(painted, (0, 1, 2))).max() < 2  # levels
    with av.open(io.BytesIO(made)) as opened:
        assert bool(opened.streams.audio) == bool(case.family.sound)
        if case.family.sound:
            (sound,) = opened.streams.audio
            assert sound.rate == SAMPLE_RATE
            assert sound.duration is not None and sound.time_base is not None
            seconds = sound.duration * sound.time_base
            assert abs(seconds - NUM_FRAMES / Fraction(case.frame_rate)) < Fraction(1, 1000)


def test_sound_that_ends_before_its_video_is_told(tiny: Any, tmp_path: Path) -> None:
    """The tiny model's sound is a few milliseconds long; a real one's is as long as its video."""
    case = VIDEO_CASES["ltx2"]
    where = context(tiny(case), tmp_path)
    latents = stage(case, where, "denoise", *given(case, where))
    _, report, heard = run_stage(asked(case, where, "decode", latents), where)
    (sentence,) = heard.warnings
    assert "video-0 lasts 0.375 s, its sound 0.00" in sentence and "silence follows" in sentence
    assert report["warnings"] == [sentence]


def test_a_job_in_a_batch_has_the_bits_it_has_alone(
    case: VideoCase, tiny: Any, tmp_path: Path
) -> None:
    """One process does a batch's requests one by one; nothing of one is left in the next."""
    where = context(tiny(case), tmp_path)
    start = given(case, where)
    alone = stage(case, where, "denoise", *start, seed=3)
    other = stage(case, where, "denoise", *start, seed=4, options={"num_inference_steps": 5})
    assert other.only() != alone.only()
    assert stage(case, where, "denoise", *start, seed=3) == alone
    video = stage(case, where, "decode", alone)
    assert stage(case, where, "decode", other) != video
    assert stage(case, where, "decode", alone) == video
    assert stage(case, where, "encode", options={"prompt": "a robot"}) != start[0]
    if case.media:
        changed = replace(case, media=case.other_media)
        assert stage(changed, where, "condition") != start[1]
    assert given(case, where) == start


@pytest.mark.parametrize(("dtype", "step"), [("float32", 3), ("bfloat16", 1)])
def test_a_killed_loop_ends_with_the_bits_of_the_undisturbed_run(
    case: VideoCase, tiny: Any, tmp_path: Path, dtype: str, step: int
) -> None:
    """UniPC's history, two transformers, two schedulers and two latents among them."""
    plain = context(tiny(case), tmp_path / "undisturbed")
    where = context(tiny(case), tmp_path / "killed", checkpoint_every_steps=1)
    start = given(case, plain, dtype=dtype)
    expected = stage(case, plain, "denoise", *start, dtype=dtype)
    loop = asked(case, where, "denoise", *given(case, where, dtype=dtype), dtype=dtype)
    with pytest.raises(Killed):
        handler_for("denoise")(loop, where, KillAt(step))
    result, report, _ = run_stage(loop, where)
    assert result == expected
    assert (report["resumed_from_step"], report["steps"]["num_run"]) == (step, 4 - step)


@pytest.mark.parametrize("case", TEXT_CASES.values(), ids=list(TEXT_CASES))
def test_without_guidance_the_negative_prompt_changes_no_bit(
    case: VideoCase, tiny: Any, tmp_path: Path
) -> None:
    """It is encoded all the same: most of these pipelines fail without its embeddings."""
    where = context(tiny(case), tmp_path)
    off = dict.fromkeys(case.family.guidance.values(), 1.0)
    made = []
    for negative, options in (("blurry", off), ("a robot", off), ("a robot", {})):
        text = {"prompt": "a fox without quotes", "negative_prompt": negative}
        embeds = stage(case, where, "encode", options=text)
        latents = stage(case, where, "denoise", embeds, options=options)
        held = unpack(ArtifactStore(where.store_url).path(latents.only())).handover.values
        made.append([held[name] for name in case.family.carried])
    assert all(map(torch.equal, made[0], made[1]))
    assert not any(map(torch.equal, made[1], made[2]))


def test_a_video_between_two_frames_equals_the_unsplit_pipeline(tmp_path: Path) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("diffusers cuts the last picture with torchvision, which is not installed")
    text = TEXT_CASES["wan"]
    case = replace(
        text,
        name="wan-i2v",
        task="first-and-last-frame",
        media={"image": picture(1), "last_image": picture(2)},
    )
    model = tiny_videos.wan(
        tmp_path / "model",
        kind=diffusers.WanImageToVideoPipeline,
        in_channels=36,
        image_dim=16,
        added_kv_proj_dim=24,
        pos_embed_seq_len=2 * 17,  # the tokens of two pictures
    )
    for dtype in ("float32", "bfloat16"):
        where = context(model, tmp_path)
        latents = stage(case, where, "denoise", *given(case, where, dtype=dtype), dtype=dtype)
        made = video_of(where, stage(case, where, "decode", latents, dtype=dtype))
        expected = whole(case, model, dtype=getattr(torch, dtype))["videos"]
        assert made == encode_mp4(frames(expected[0]), case.frame_rate)


def test_phases_load_only_what_they_compute_with(case: VideoCase, tiny: Any) -> None:
    graph = split(case.family, case.task)
    assert loaded_by_phase(graph, tiny(case)) == case.loads


def test_inspect_finds_a_familys_files_whole(case: VideoCase, tiny: Any, tmp_path: Path) -> None:
    where = context(tiny(case), tmp_path)
    result = run_stage(request("inspect", {}, family=case.name, task=case.task), where)[0]
    manifest = Manifest.model_validate_json(ArtifactStore(where.store_url).read(result.only()))
    weighty = set(manifest.num_parameters)
    assert {
        phase: set(facts.components) & weighty for phase, facts in manifest.phases.items()
    } == case.loads
    taken = {phase: {*facts.options, *facts.inputs} for phase, facts in manifest.phases.items()}
    assert all(set(options) <= taken[phase] for phase, options in case.options.items())
    if case.media:
        assert manifest.phases["condition"].inputs == ()  # no prompt is looked at


@pytest.mark.parametrize("case", TEXT_CASES.values(), ids=list(TEXT_CASES))
def test_what_each_encoder_does_not_read_is_told(
    case: VideoCase, tiny: Any, tmp_path: Path
) -> None:
    where = context(tiny(case), tmp_path)
    long = {"prompt": "red fox " * 400 + "hedgehog"}
    embeds = stage(case, where, "encode", options=long)
    facts = unpack(ArtifactStore(where.store_url).path(embeds.only())).facts
    cut = {use["encoder"]: use for use in facts["tokens"] if use["prompt"] == "prompt"}
    assert set(cut) == {reading.encoder for reading in case.family.tokenizers.values()}
    for use in cut.values():
        assert use["tokens_used"] < use["tokens_total"]
        assert use["dropped_text"].endswith("hedgehog")


@pytest.mark.parametrize("case", TEXT_CASES.values(), ids=list(TEXT_CASES))
def test_a_model_that_moved_and_has_only_variant_weights_makes_the_same_bits(
    case: VideoCase, tiny: Any, tmp_path: Path
) -> None:
    """In a folder with spaces and letters of another script, behind links."""
    moved = Path(shutil.copytree(tiny(case), tmp_path / "модель two"))
    for weights in moved.glob("*/*.safetensors"):
        behind = weights.rename(tmp_path / f"{weights.parent.name}.safetensors")
        weights.with_name(f"{weights.stem}.fp16.safetensors").symlink_to(behind)
    made = []
    for number, model_dir in enumerate((tiny(case), moved)):
        where = context(model_dir, tmp_path / str(number))
        latents = stage(case, where, "denoise", *given(case, where))
        made.append([latents, stage(case, where, "decode", latents)])
    assert made[0] == made[1]


def test_a_video_needs_a_frame_rate_before_its_model_loads(tiny: Any, tmp_path: Path) -> None:
    case = VIDEO_CASES["wan"]
    where = context(tiny(case), tmp_path)
    latents = stage(case, where, "denoise", *given(case, where))
    for wrong in (None, 0, 500, "24", True):
        with pytest.raises(RequestError, match="frame_rate is"):
            stage(case, where, "decode", latents, options={"frame_rate": wrong})


def test_sound_that_is_not_finite_is_refused_and_no_video_is_written(
    tiny: Any, tmp_path: Path
) -> None:
    case = VIDEO_CASES["ltx2"]
    where = context(tiny(case), tmp_path)
    latents = stage(case, where, "denoise", *given(case, where))
    store = ArtifactStore(where.store_url)
    held = unpack(store.path(latents.only()))
    held.handover.values["audio_latents"][0, 2] = torch.nan
    ref = store.put(pack("denoise", held.handover, held.facts))
    spoiled = StageResult(stage="denoise", artifacts={"latents": ref})
    with pytest.raises(BorderError, match=r"audio_latents .* NaN"):
        stage(case, where, "decode", spoiled)


def test_a_video_larger_than_a_tile_may_be_decoded_in_tiles(tiny: Any, tmp_path: Path) -> None:
    case = replace(TEXT_CASES["wan"], edge=288)  # a tile of its VAE has 256 pixels
    where = context(tiny(case), tmp_path)
    latents = stage(case, where, "denoise", *given(case, where))
    at_once = stage(case, where, "decode", latents)
    tiled = stage(case, where, "decode", latents, options={"tiling": True})
    assert set(tiled.artifacts) == {"video-0", "tiling"}
    assert tiled.artifacts["video-0"] != at_once.artifacts["video-0"]
    assert stage(case, where, "decode", latents) == at_once

"""Lengths of videos: what a VAE's configuration allows, and what is said about other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import ModelError, RequestError
from stages.media import Settings, read_settings
from stages.mp4 import encode_mp4
from stages.rules import check_share
from stages.size_rules import check_num_frames, temporal_multiple, vae_scale
from tests.stages.test_mp4 import scenes
from tests.support.saved import write_mp4
from tests.support.video_cases import TEXT_CASES

PUBLISHED: list[tuple[dict[str, Any], int, int]] = [
    ({"scale_factor_temporal": 4, "scale_factor_spatial": 8}, 4, 8),  # Wan 2.1
    ({"temperal_downsample": [False, True, True]}, 4, 8),
    (
        {
            "spatio_temporal_scaling": [True, True, True, False],
            "patch_size": 4,
            "patch_size_t": 1,
        },
        8,
        32,
    ),  # LTX
    ({"temporal_compression_ratio": 4, "spatial_compression_ratio": 16}, 4, 16),  # Hunyuan
]


@pytest.mark.parametrize(("vae", "frames", "pixels"), PUBLISHED)
def test_a_configuration_tells_how_it_packs_space_and_time(
    vae: dict[str, Any], frames: int, pixels: int
) -> None:
    assert (temporal_multiple(vae), vae_scale(vae)) == (frames, pixels)


@pytest.mark.parametrize("name", sorted(TEXT_CASES))
def test_the_rule_agrees_with_the_pipeline_of_each_family(name: str, tiny: Any) -> None:
    import diffusers

    from stages.models import open_model

    case = TEXT_CASES[name]
    config = open_model(tiny(case)).components["vae"].config()
    vae = getattr(diffusers, config["_class_name"]).from_pretrained(tiny(case) / "vae")
    if "wan" in name:
        factor = 2 ** sum(vae.temperal_downsample)
    else:  # where the configuration has it, diffusers wants it read there
        own = vae.config.get("temporal_compression_ratio")
        factor = vae.temporal_compression_ratio if own is None else own
    assert temporal_multiple(config) == factor


def test_a_configuration_that_does_not_tell_is_refused() -> None:
    with pytest.raises(ModelError, match="AutoencoderKLX does not tell how it compresses time"):
        temporal_multiple({"_class_name": "AutoencoderKLX"})


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8]))
def test_the_numbers_that_are_named_are_valid_and_nearest(number: int, multiple: int) -> None:
    if (number - 1) % multiple == 0:
        assert check_num_frames(number, multiple) == number
        return
    with pytest.raises(RequestError) as caught:
        check_num_frames(number, multiple)
    below, above = map(int, str(caught.value).rpartition("use ")[2].split(" or "))
    assert check_num_frames(below, multiple) < number < check_num_frames(above, multiple)
    assert above - below == multiple


@pytest.mark.parametrize("wrong", [0, -4, True, 9.0, "9", None])
def test_what_is_no_number_of_frames_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="num_frames is"):
        check_num_frames(wrong, 4)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), "half"])
def test_what_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(RequestError, match="decode_timestep is"):
        check_share(wrong, "decode_timestep")


def test_a_video_carries_its_settings_under_a_name_of_its_own(tmp_path: Path) -> None:
    settings = Settings(
        prompt="füchse\n狐",
        seed=2**64 - 1,
        num_inference_steps=4,
        guidance_scale=4.0,
        other_scales={"guidance_scale_2": 3.0},
        scheduler="UniPCMultistepScheduler",
        height=64,
        width=96,
        num_frames=9,
        frame_rate=16.0,
        model="tiny",
    )
    mp4 = encode_mp4(scenes(9), 16)
    paths = [write_mp4(mp4, tmp_path, prompt="füchse", seed=7, settings=settings) for _ in "ab"]
    assert [path.suffix for path in paths] == [".mp4", ".mp4"]
    assert len(set(paths)) == 2
    assert read_settings(paths[0]) == settings
    named = write_mp4(mp4, tmp_path, name="shots/one")
    assert named == tmp_path / "shots" / "one.mp4"
    assert named.read_bytes() == mp4
    with pytest.raises(RequestError, match="carries no settings"):
        read_settings(named)
    named.write_bytes(b"something else")
    with pytest.raises(RequestError, match="no MP4 file"):
        read_settings(named)

"""MP4 files: what a player finds in them, equal bytes for equal frames, settings inside."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from stages.errors import ArtifactError
from stages.mp4 import Sound, encode_mp4, read_texts, with_texts

RATE = 16_000


def scenes(num_frames: int, height: int = 64, width: int = 96) -> list[np.ndarray[Any, Any]]:
    """Colours that run into each other, and move."""
    y, x = np.mgrid[0:height, 0:width]
    return [
        np.stack([(x * 2 + n * 3) % 256, y * 255 // height, np.full_like(x, 120)], -1).astype(
            np.uint8
        )
        for n in range(num_frames)
    ]


def tone(seconds: float, channels: int = 2) -> Sound:
    time = np.arange(int(seconds * RATE)) / RATE
    wave = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    return Sound(samples=np.stack([wave] * channels), sample_rate=RATE)


def frames_of(mp4: bytes) -> list[np.ndarray[Any, Any]]:
    with av.open(io.BytesIO(mp4)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


@pytest.mark.parametrize("rate", [24, 16.0, 24000 / 1001, 29.97])
def test_frames_come_back_at_their_rate_and_in_their_colours(rate: float) -> None:
    painted = scenes(12)
    made = encode_mp4(iter(painted), rate)
    seen = frames_of(made)
    assert len(seen) == 12
    for one, other in zip(seen, painted, strict=True):
        assert np.abs(one.astype(int) - other).mean() < 4  # levels; chroma has half the edges
    with av.open(io.BytesIO(made)) as opened:
        video = opened.streams.video[0]
        expected = Fraction(rate).limit_denominator(1001)
        assert video.average_rate == expected
        assert video.duration is not None and video.time_base is not None
        assert abs(video.duration * video.time_base - 12 / expected) < Fraction(1, 1000)


def test_flat_colours_are_read_by_the_matrix_that_the_file_names() -> None:
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (20, 120, 220)):
        flat = np.full((32, 32, 3), colour, np.uint8)
        seen = frames_of(encode_mp4([flat, flat], 24))
        assert np.abs(seen[0].astype(int) - flat).max() <= 4


@pytest.mark.parametrize(("height", "width"), [(31, 50), (53, 33), (1, 1), (15, 16), (54, 64)])
def test_an_odd_edge_gets_one_more_row_or_column_and_nothing_is_scaled(
    height: int, width: int
) -> None:
    painted = np.full((height, width, 3), (200, 60, 90), np.uint8)
    (seen,) = frames_of(encode_mp4([painted], 24))
    assert seen.shape == (height + height % 2, width + width % 2, 3)
    assert np.abs(seen.astype(int) - (200, 60, 90)).max() <= 4  # levels


@pytest.mark.parametrize("level", [0, 16, 128, 235, 255])
def test_greys_come_back_whatever_range_a_file_keeps_them_in(level: int) -> None:
    flat = np.full((32, 32, 3), level, np.uint8)
    made = encode_mp4([flat] * 3, 24)
    assert np.abs(frames_of(made)[1].astype(int) - level).max() <= 2
    with av.open(io.BytesIO(made)) as opened:
        context = opened.streams.video[0].codec_context
        bt709, limited = 1, 1
        assert (context.colorspace, context.color_primaries, context.color_trc) == (bt709,) * 3
        assert context.color_range == limited


@pytest.mark.parametrize("rate", [16, 24, 25, 50, 60, 30000 / 1001])
@pytest.mark.parametrize("beyond_s", [-0.4, 0.0, 0.4])
def test_sound_ends_with_the_last_frame_and_changes_no_frame(rate: float, beyond_s: float) -> None:
    painted = [np.full((16, 16, 3), n * 3, np.uint8) for n in range(69)]
    silent = encode_mp4(painted, rate)
    made = encode_mp4(painted, rate, tone(len(painted) / rate + beyond_s))
    seen = frames_of(made)
    assert len(seen) == len(painted)
    assert all(map(np.array_equal, seen, frames_of(silent)))
    assert (seen[0].mean() < 2) and abs(seen[-1].mean() - 68 * 3) < 2  # levels
    with av.open(io.BytesIO(made)) as opened:
        (sound,) = opened.streams.audio
        assert sound.duration is not None and sound.time_base is not None
        assert abs(sound.duration * sound.time_base - 69 / Fraction(rate)) < Fraction(1, 500)


@pytest.mark.parametrize("channels", [1, 2])
def test_sound_has_its_length_rate_and_channels(channels: int) -> None:
    made = encode_mp4(scenes(24), 24, tone(1.0, channels))
    with av.open(io.BytesIO(made)) as opened:
        (sound,) = opened.streams.audio
        assert (sound.rate, sound.channels) == (RATE, channels)
        assert sound.duration is not None and sound.time_base is not None
        assert sound.duration * sound.time_base == 1
        heard = np.concatenate([each.to_ndarray() for each in opened.decode(audio=0)], axis=1)
    spectrum = np.abs(np.fft.rfft(heard[0, :RATE]))
    assert abs(int(spectrum.argmax()) - 440) <= 1  # Hz


def test_equal_frames_and_sound_make_equal_bytes() -> None:
    made = {encode_mp4(scenes(48), 24, tone(2.0)) for _ in range(8)}
    assert len(made) == 1


def test_a_browser_may_begin_before_it_has_the_whole_file() -> None:
    made = encode_mp4(scenes(12), 24, tone(0.5))
    for mp4 in (made, with_texts(made, {"comment": "x"})):
        assert mp4.index(b"moov") < mp4.index(b"mdat")


def test_texts_go_in_and_come_out_and_no_frame_changes(tmp_path: Path) -> None:
    made = encode_mp4(scenes(12), 24, tone(0.5))
    text = json.dumps({"prompt": "füchse, 狐\n" + "long " * 25_000}, ensure_ascii=False)
    carrying = with_texts(made, {"comment": text})
    path = tmp_path / "video.mp4"
    path.write_bytes(carrying)
    assert read_texts(path)["comment"] == text
    assert carrying == with_texts(made, {"comment": text})
    assert all(map(np.array_equal, frames_of(made), frames_of(carrying)))
    path.write_bytes(made)
    assert "comment" not in read_texts(path)


def test_what_no_video_can_be_made_of_is_refused() -> None:
    with pytest.raises(ArtifactError, match="without frames"):
        encode_mp4([], 24)
    samples = np.zeros((5, 100), np.float32)
    with pytest.raises(ArtifactError, match=r"shape \(5, 100\)"):
        encode_mp4(scenes(1), 24, Sound(samples=samples, sample_rate=RATE))
    with pytest.raises(ArtifactError, match="no MP4 file"):
        with_texts(b"no video at all", {})

"""Videos that are given: frames in their order, upright, at one size; everything else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from stages.errors import RequestError
from stages.image_inputs import InputLimits
from stages.mp4 import Sound, encode_mp4
from stages.video_inputs import InputVideo, read_video
from tests.support.video_files import write_lossless


def numbered(count: int, width: int = 64, height: int = 48) -> list[Image.Image]:
    """Frames whose brightness tells their place."""
    return [Image.new("RGB", (width, height), (n * 10,) * 3) for n in range(count)]


def as_it_is(width: int, height: int) -> tuple[int, int]:
    return height, width


def read(path: Path | str, **changes: Any) -> InputVideo:
    return read_video(str(path), **{"most_frames": 100, "size_for": as_it_is} | changes)


@pytest.mark.parametrize("extension", ["mkv", "avi"])
def test_frames_come_in_their_order_without_loss(tmp_path: Path, extension: str) -> None:
    frames = numbered(9)
    made = read(write_lossless(frames, tmp_path / f"füchse und 狐.{extension}", rate=24))
    assert all(map(np.array_equal, made.frames, frames))
    assert (len(made.frames), made.frame_rate, made.has_more) == (9, 24.0, False)
    assert made.warnings == ()


def test_our_own_files_and_animated_gifs_are_read(tmp_path: Path) -> None:
    frames = numbered(9)
    mp4 = tmp_path / "a.mp4"
    mp4.write_bytes(encode_mp4([np.asarray(each) for each in frames], 16))
    gif = tmp_path / "a.gif"
    frames[0].save(gif, save_all=True, append_images=frames[1:], duration=100)
    for path in (mp4, gif):
        found = [np.asarray(each).mean() for each in read(path).frames]
        assert np.abs(np.asarray(found) - np.arange(9) * 10).max() <= 4  # levels


def test_no_more_frames_are_read_than_wanted(tmp_path: Path) -> None:
    path = write_lossless(numbered(20), tmp_path / "a.mkv")
    made = read(path, most_frames=5)
    assert len(made.frames) == 5 and made.has_more
    assert not read(path, most_frames=20).has_more


def test_frames_have_the_size_that_is_wanted_and_a_large_cut_is_told(tmp_path: Path) -> None:
    path = write_lossless(numbered(3), tmp_path / "a.mkv")
    made = read(path, size_for=lambda width, height: (32, 32), name="video")
    assert {each.size for each in made.frames} == {(32, 32)}
    assert "video is 64 x 48 pixels" in made.warnings[0] and "25 % are cut off" in made.warnings[0]


def test_a_mask_is_read_as_grey(tmp_path: Path) -> None:
    path = write_lossless(numbered(3), tmp_path / "a.mkv")
    made = read(path, is_mask=True)
    assert [each.mode for each in made.frames] == ["L"] * 3
    assert [each.getpixel((5, 5)) for each in made.frames] == [0, 10, 20]


def refused(path: Path | str, message: str, **changes: Any) -> None:
    with pytest.raises(RequestError, match=message):
        read(path, **changes)


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    (text := tmp_path / "a.txt").write_text("a fox")
    numbered(1)[0].save(picture := tmp_path / "a.png")
    refused(tmp_path / "none.mp4", "none.mp4 does not exist")
    refused(text, "is no video that is read here; give an MP4")
    refused(picture, "is no video that is read here")
    refused(tmp_path, "is a folder")
    refused("https://example.org/a.mp4", "nothing is fetched from the network")
    (empty := tmp_path / "b.mp4").touch()
    refused(empty, "is empty")


@pytest.mark.parametrize("playlist", ["#EXTM3U\nfile:///etc/hostname", "ffconcat version 1.0"])
def test_no_list_of_other_files_is_followed(tmp_path: Path, playlist: str) -> None:
    (path := tmp_path / "a.mp4").write_text(f"{playlist}\nfile '/etc/hostname'\n")
    refused(path, "is no video that is read here")
    refused(f"concat:{path}", "does not exist")


def test_damaged_files_and_sound_alone_are_refused(tmp_path: Path) -> None:
    mp4 = encode_mp4([np.asarray(each) for each in numbered(9)], 16)
    for nbytes in (40, 200, len(mp4) // 2, len(mp4) - 200):
        (damaged := tmp_path / "a.mp4").write_bytes(mp4[:nbytes])
        refused(damaged, "a.mp4 is damaged")
    heard = tmp_path / "b.mp4"
    with av.open(str(heard), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    refused(heard, "only sound")
    silence = Sound(samples=np.zeros((1, 9000), np.float32), sample_rate=16_000)
    both = tmp_path / "c.mp4"
    both.write_bytes(encode_mp4([np.asarray(each) for each in numbered(9)], 16, silence))
    assert len(read(both).frames) == 9


def test_files_and_frames_beyond_the_limits_are_refused_before_a_frame_is_decoded(
    tmp_path: Path,
) -> None:
    path = write_lossless(numbered(3), tmp_path / "a.mkv")
    refused(path, "MiB, allowed are", limits=InputLimits(max_bytes=100, max_pixels=10**6))
    refused(path, "64 x 48 pixels, allowed are 3000 in all", limits=InputLimits(max_pixels=3000))


def test_a_video_that_a_phone_has_turned_is_upright(tmp_path: Path) -> None:
    """A phone keeps frames as its sensor sees them, and notes how they are to be shown."""
    frame = Image.new("RGB", (64, 48))
    frame.paste((250, 250, 250), (0, 0, 64, 12))  # the top, as the sensor sees it
    mp4 = bytearray(encode_mp4([np.asarray(frame)] * 3, 16))
    at = mp4.index(b"tkhd") + 4 + 4 + 20 + 8 + 8  # the matrix of the track
    quarter_turn = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    mp4[at : at + 36] = b"".join(each.to_bytes(4, "big", signed=True) for each in quarter_turn)
    (path := tmp_path / "a.mp4").write_bytes(mp4)
    made = read(path).frames[0]
    assert made.size == (48, 64)
    levels = np.asarray(made.convert("L"))
    assert levels[:, -12:].mean() > 200  # turned clockwise, the top is on the right
    assert levels[:, :30].mean() < 50

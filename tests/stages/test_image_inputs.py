"""Pictures from a user's disk: what each kind of file becomes, and what is refused."""

from __future__ import annotations

import io
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from stages.errors import RequestError
from stages.image_inputs import InputLimits, read_mask, read_picture
from tests.support.picture_tasks import picture, saved

SIZE = (6, 4)
COLOUR = picture(1, *SIZE)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a picture's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode and np.array_equal(np.asarray(one), np.asarray(other))


def read(path: Path | str, **options: Any) -> Image.Image:
    return read_picture(path, **options).pixels


# ---- formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.tiff", "x.ppm", "x.gif.png", "no ending"])
def test_lossless_files_of_one_picture_are_one_input(tmp_path: Path, name: str) -> None:
    kind = {"no ending": "PNG"}.get(name)
    assert same(read(saved(COLOUR, tmp_path / name, format=kind)), COLOUR)


@pytest.mark.parametrize("name", ["x.jpg", "x.webp", "x.avif", "x.gif"])
def test_lossy_files_are_read_too(tmp_path: Path, name: str) -> None:
    even = Image.new("RGB", (32, 32), (200, 60, 20))
    found = np.asarray(read(saved(even, tmp_path / name))).astype(int)
    assert np.abs(found - np.asarray(even)).max() <= 8


def test_the_ending_of_a_name_says_nothing(tmp_path: Path) -> None:
    assert same(read(saved(COLOUR, tmp_path / "x.jpg", format="PNG")), COLOUR)


@pytest.mark.parametrize(
    ("orientation", "back"),
    [
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_270),
    ],
)
def test_a_photograph_is_turned_upright(tmp_path: Path, orientation: int, back: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = COLOUR.transpose(back)
    assert same(read(saved(lying, tmp_path / "x.png", exif=exif)), COLOUR)


def test_exif_that_cannot_be_read_turns_nothing(tmp_path: Path) -> None:
    assert same(read(saved(COLOUR, tmp_path / "x.png", exif=b"Exif\0\0MM\0\x2a\xff\xff")), COLOUR)


def test_transparency_is_laid_over_white(tmp_path: Path) -> None:
    rgba = COLOUR.convert("RGBA")
    rgba.putpixel((0, 0), (10, 20, 30, 0))
    found = read_picture(saved(rgba, tmp_path / "x.png"))
    expected = COLOUR.copy()
    expected.putpixel((0, 0), (255, 255, 255))
    assert same(found.pixels, expected)
    assert found.alpha is not None
    assert found.alpha.getpixel((0, 0)) == 0
    assert not found.warnings


def test_a_palette_with_a_transparent_colour_is_laid_over_white(tmp_path: Path) -> None:
    flat = Image.new("P", SIZE)
    flat.putpalette([0, 0, 200, 200, 0, 0])
    flat.putpixel((1, 1), 1)
    found = read(saved(flat, tmp_path / "x.png", transparency=0))
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((1, 1)) == (200, 0, 0)


def test_opaque_alpha_is_no_alpha(tmp_path: Path) -> None:
    found = read_picture(saved(COLOUR.convert("RGBA"), tmp_path / "x.png"))
    assert found.alpha is None
    assert same(found.pixels, COLOUR)


def test_a_picture_of_nothing_is_told(tmp_path: Path) -> None:
    clear = Image.new("RGBA", SIZE, (5, 5, 5, 0))
    (warning,) = read_picture(saved(clear, tmp_path / "x.png")).warnings
    assert "transparent everywhere" in warning


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "YCbCr"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    even = Image.new("RGB", (16, 16), (255, 255, 255)).convert(mode)
    name = "x.jpg" if mode == "YCbCr" else "x.png"
    found = read(saved(even, tmp_path / name))
    assert found.mode == "RGB"
    assert found.getpixel((3, 3)) == (255, 255, 255)


def test_cmyk_becomes_rgb_and_is_told(tmp_path: Path) -> None:
    even = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    found = read_picture(saved(even, tmp_path / "x.tiff"))
    assert found.pixels.getpixel((3, 3)) == (255, 0, 0)
    assert "is CMYK" in found.warnings[0]


def test_sixteen_bits_are_rounded_to_eight(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 257, 65535, 65278]], np.uint16)
    for name in ("x.png", "x.tiff"):
        found = read(saved(Image.fromarray(values), tmp_path / name))
        assert [level[0] for level in np.asarray(found)[0].tolist()] == [0, 0, 1, 1, 255, 254]


def test_floating_point_is_refused(tmp_path: Path) -> None:
    path = saved(Image.fromarray(np.ones((4, 4), np.float32)), tmp_path / "x.tiff")
    with pytest.raises(RequestError, match="holds floating-point values; save it with 8"):
        read(path)


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff"])
def test_of_an_animation_the_first_frame_is_taken(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    options = {"save_all": True, "append_images": frames[1:]}
    options |= {"lossless": True} if name == "x.webp" else {}
    found = read_picture(saved(frames[0], tmp_path / name, **options))
    assert found.pixels.getpixel((3, 3)) == (255, 0, 0)
    assert found.warnings[0].endswith(f"{name} has 3 frames; the first one is used")


def test_a_colour_profile_other_than_srgb_is_told(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert not read_picture(saved(COLOUR, tmp_path / "a.png", icc_profile=srgb)).warnings
    (warning,) = read_picture(saved(COLOUR, tmp_path / "b.png", icc_profile=lab)).warnings
    assert "colour profile other than sRGB" in warning


def test_one_pixel_is_a_picture(tmp_path: Path) -> None:
    assert read(saved(picture(1, 1, 1), tmp_path / "x.png")).size == (1, 1)


# ---- paths ---------------------------------------------------------------------------------


def test_paths_of_every_kind_lead_to_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(COLOUR, tmp_path / "картина 1 %41.png")
    link = tmp_path / "link.png"
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (path, path.name, f"~/{path.name}", link, path.as_uri(), str(path)):
        assert same(read(source), COLOUR)


@pytest.mark.parametrize("source", ["", "  ", "a\0b.png", None, 3, True, b"x.png", ["x.png"]])
def test_what_is_no_path_is_refused(source: Any) -> None:
    with pytest.raises(RequestError, match=r"^image is .*expected"):
        read_picture(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.png", "does not exist"),
        (".", "is a folder"),
        ("pipe", "is no ordinary file"),
        ("loop", "cannot be opened: Too many levels"),
        ("empty.png", "is empty: 0 bytes"),
        ("a" * 300, "cannot be opened: File name too long"),
        ("s3://bucket/x.png", "its scheme is 's3', allowed are paths and file://"),
        ("data:image/png;base64,xx", "its scheme is 'data'"),
        ("file://elsewhere/x.png", "names no file of this machine"),
        ("file:///a%00b.png", "names no file of this machine"),
    ],
)
def test_paths_that_lead_to_no_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("empty.png").touch()
    with pytest.raises(RequestError, match=reason):
        read_picture(source)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    path = saved(COLOUR, tmp_path / "x.png")
    path.chmod(0)
    with pytest.raises(RequestError, match="cannot be opened: Permission denied"):
        read(path)


def test_an_error_shows_no_control_characters(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not exist") as raised:
        read_picture(str(tmp_path / "\x1b[31m\n.png"))
    assert "\x1b" not in str(raised.value)
    assert "\n" not in str(raised.value)


# ---- bytes that are no picture, or too much of one -----------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><svg/>", "an SVG drawing or another XML"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC picture"),
        (b"\0\0\0\x18ftypisom\0\0\0\0mp42", "a video"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a PostScript file"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"hello", "no picture of a known kind"),
        (b"\x89PNG\r\n\x1a\n", "no picture of a known kind"),
        (b"\xff\xd8\xff", "no picture of a known kind"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_name(
    tmp_path: Path, content: bytes, what: str
) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=rf"x.png is {what}.* save it as PNG or JPEG"):
        read(path)


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.webp", "x.gif", "x.bmp", "x.tiff"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_a_picture_that_is_cut_off_is_refused(tmp_path: Path, name: str, share: float) -> None:
    path = saved(picture(1, 64, 64), tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(RequestError, match=r"is cut off or damaged|no picture of a known kind"):
        read(path)


def test_a_file_over_the_limit_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(RequestError, match="has 1024 MiB, allowed are 256 MiB"):
        read(path)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says what its header says, whatever it holds."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


@pytest.mark.parametrize("edge", [9_000, 20_000, 2**31 - 1])
def test_a_small_file_of_many_pixels_is_refused_by_its_header(tmp_path: Path, edge: int) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(edge, edge, (b"IDAT", zlib.compress(bytes(2**20)))))
    with pytest.raises(RequestError, match="pixels"):
        read(path)


def test_a_text_in_a_picture_that_inflates_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    text = b"comment\0\0" + zlib.compress(bytes(500 * 2**20), 9)
    path.write_bytes(png(4, 4, (b"zTXt", text)))
    with pytest.raises(RequestError, match="too large"):
        read(path)


def test_the_limits_are_arguments(tmp_path: Path) -> None:
    path = saved(COLOUR, tmp_path / "x.png")
    with pytest.raises(RequestError, match="is 6 x 4 pixels"):
        read(path, limits=InputLimits(max_pixels=23))
    assert read(path, limits=InputLimits(max_pixels=24)).size == SIZE


# ---- masks ---------------------------------------------------------------------------------


def test_a_mask_of_any_mode_is_grey(tmp_path: Path) -> None:
    of = read_picture(saved(COLOUR, tmp_path / "x.png"))
    levels = Image.new("L", SIZE)
    levels.putpixel((2, 2), 255)
    for mode in ("1", "L", "RGB", "RGBA", "P", "LA"):
        found = read_mask(saved(levels.convert(mode), tmp_path / f"{mode}.png"), of)
        assert same(found.pixels, levels), mode


def test_where_a_mask_is_transparent_the_picture_is_kept(tmp_path: Path) -> None:
    of = read_picture(saved(COLOUR, tmp_path / "x.png"))
    painted = Image.new("RGBA", SIZE, (255, 255, 255, 0))
    painted.putpixel((2, 2), (255, 255, 255, 255))
    found = read_mask(saved(painted, tmp_path / "mask.png"), of).pixels
    assert found.getpixel((2, 2)) == 255
    assert found.getpixel((0, 0)) == 0


def test_the_transparent_part_of_a_picture_can_be_its_mask(tmp_path: Path) -> None:
    rgba = COLOUR.convert("RGBA")
    rgba.putpixel((2, 2), (0, 0, 0, 0))
    of = read_picture(saved(rgba, tmp_path / "x.png"))
    found = read_mask("alpha", of).pixels
    assert found.getpixel((2, 2)) == 255
    assert found.getpixel((0, 0)) == 0
    with pytest.raises(RequestError, match="image has no transparent part; give a mask"):
        read_mask("alpha", read_picture(saved(COLOUR, tmp_path / "y.png")))


def test_a_mask_of_another_size_or_of_nothing_is_refused(tmp_path: Path) -> None:
    of = read_picture(saved(COLOUR, tmp_path / "x.png"))
    other = saved(Image.new("L", (4, 6), 255), tmp_path / "other.png")
    with pytest.raises(RequestError, match="is 4 x 6 pixels, but image is 6 x 4; bring the mask"):
        read_mask(other, of)
    black = saved(Image.new("L", SIZE), tmp_path / "black.png")
    with pytest.raises(RequestError, match="is black everywhere"):
        read_mask(black, of)


# ---- bytes of any kind ---------------------------------------------------------------------

SEEDS = [
    encoded(picture(1, 16, 16), name, **options)
    for name, options in (
        ("PNG", {}),
        ("JPEG", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"}),
        ("GIF", {"save_all": True, "append_images": [picture(2, 16, 16)]}),
        ("WEBP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("BMP", {}),
        ("AVIF", {}),
        ("PPM", {}),
    )
]


@settings(max_examples=200, deadline=None)
@given(
    content=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=12),
    cut=st.integers(0, 2**16),
)
def test_damaged_bytes_are_a_picture_or_a_clear_error(
    content: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    """No other exception, and no picture beyond the limits, comes out of a decoder."""
    damaged = bytearray(content)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    damaged = damaged[: len(damaged) - (cut % len(damaged) if cut % 3 == 0 else 0)]
    limits = InputLimits(max_pixels=64 * 64)
    with tempfile.NamedTemporaryFile() as file:
        file.write(damaged)
        file.flush()
        try:
            found = read_picture(file.name, limits=limits)
        except RequestError as error:
            assert str(error).startswith("image ")
            return
    assert found.pixels.mode == "RGB"
    assert found.pixels.width * found.pixels.height <= limits.max_pixels

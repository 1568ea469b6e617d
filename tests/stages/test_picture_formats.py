"""Pictures in every format carry the same settings, and a label when asked; decoders read on."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image, ImageFile

from stages.errors import ArtifactError, RequestError
from stages.finished import finished
from stages.media import read_settings, write_file
from stages.mp4 import encode_mp4
from stages.mp4 import read_texts as read_mp4
from stages.png_text import read_texts
from stages.saving import PAINTED, PAINTED_OVER, SaveAs, choose_saving
from stages.xmp import packet, settings_in
from tests.stages.test_media import SETTINGS

Format = Literal["png", "jpeg", "webp", "mp4"]
FORMATS: tuple[Format, ...] = ("png", "jpeg", "webp", "mp4")
USER_COMMENT, EXIF = 0x9286, 0x8769
SOURCE_TYPE = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}DigitalSourceType"
MP4_XMP = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")

# 5 kB of what is hard to keep: emoji beyond the first plane, right to left, marks, XML, controls.
PROMPT = (
    "\U0001f98a a f\u00f6x, \u5bcc\u58eb\u5c71 <b>&amp;</b> ]]> \u0634\u062a\u0627\u0621 "
    "\U0001f469\u200d\U0001f680 e\u0301 \x07\t\r\n \ufffe \x85 'quoted' \"too\" "
)
LONG = dataclasses.replace(SETTINGS, prompt=(PROMPT * 60)[:4000], negative_prompt="\U0001f4a5 blur")


@pytest.fixture(scope="module")
def media() -> dict[str, bytes]:
    """A picture and a clip as decode makes them."""
    ramp = np.arange(96 * 64 * 3, dtype=np.uint32).reshape(64, 96, 3) // 96
    levels = (ramp % 256).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return {"png": buffer.getvalue(), "mp4": encode_mp4([levels] * 3, 8)}


def saved(
    media: dict[str, bytes], folder: Path, settings: Any = LONG, **fields: Any
) -> tuple[Path, SaveAs]:
    save_as = SaveAs(**fields)
    content = finished(media["mp4" if save_as.format == "mp4" else "png"], save_as, settings)
    return write_file(content, folder, save_as.extension, prompt="a fox", seed=1), save_as


def xmp_of(path: Path) -> bytes:
    """The packet, found by other programs' code where there is such."""
    if path.suffix == ".mp4":
        return path.read_bytes().partition(MP4_XMP)[2]
    with Image.open(path) as picture:
        picture.load()
        found = picture.info.get("xmp") or picture.info.get("XML:com.adobe.xmp") or b""
    return found.encode() if isinstance(found, str) else bytes(found)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_settings_come_back_from_every_format(
    media: dict[str, bytes], tmp_path: Path, format: Format
) -> None:
    path, save_as = saved(media, tmp_path, format=format)
    assert len(LONG.prompt.encode()) > 5_000
    assert read_settings(path) == LONG
    assert path.suffix == save_as.extension
    again, _ = saved(media, tmp_path, format=format)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_other_tools_find_the_parameters_in_the_user_comment(
    media: dict[str, bytes], tmp_path: Path, format: Format
) -> None:
    """UNICODE, as the standard calls UTF-16, in the byte order of the data around it."""
    path, _ = saved(media, tmp_path, format=format)
    with Image.open(path) as picture:
        comment = picture.getexif().get_ifd(EXIF)[USER_COMMENT]
    assert comment.startswith(b"UNICODE\0")
    assert comment[8:].decode("utf-16-be") == LONG.as_parameters()


def test_a_png_and_an_mp4_have_their_texts_where_they_were(
    media: dict[str, bytes], tmp_path: Path
) -> None:
    png, _ = saved(media, tmp_path)
    assert read_texts(png) == {"parameters": LONG.as_parameters(), "exeunt": LONG.as_json()}
    mp4, _ = saved(media, tmp_path, format="mp4")
    assert read_mp4(mp4)["comment"] == LONG.as_json()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("settings", [LONG, None])
def test_a_label_is_read_as_xml_and_changes_no_pixel(
    media: dict[str, bytes], tmp_path: Path, format: Format, settings: Any
) -> None:
    path, _ = saved(media, tmp_path, settings, format=format, source_type=PAINTED)
    plain, _ = saved(media, tmp_path, settings, format=format)
    found = ElementTree.fromstring(xmp_of(path)).findall(f".//{SOURCE_TYPE}")
    assert [each.text for each in found] == [
        "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
    ]
    assert b"DigitalSourceType" not in plain.read_bytes()
    assert pixels(path) == pixels(plain)
    if settings is not None:
        assert read_settings(path) == settings


def pixels(path: Path) -> bytes:
    """As a strict decoder reads them: one that forgives nothing that is cut off or damaged."""
    if path.suffix == ".mp4":
        import av

        with av.open(str(path), options={"err_detect": "explode"}) as container:
            return b"".join(frame.to_ndarray().tobytes() for frame in container.decode(video=0))
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    with Image.open(path) as picture:
        picture.verify()
    with Image.open(path) as picture:
        return picture.tobytes()


def test_the_picture_is_close_to_the_one_that_was_painted(
    media: dict[str, bytes], tmp_path: Path
) -> None:
    painted = np.asarray(Image.open(io.BytesIO(media["png"])), dtype=int)
    sizes = {}
    for format, quality in (("jpeg", 95), ("jpeg", 20), ("webp", 95), ("webp", 20)):
        path, _ = saved(media, tmp_path, None, format=format, quality=quality)
        with Image.open(path) as picture:
            assert (picture.format, picture.mode) == (format.upper(), "RGB")
            error = np.abs(np.asarray(picture, dtype=int) - painted).mean()
        assert error < (6 if quality == 95 else 40)
        sizes[format, quality] = path.stat().st_size
    assert sizes["jpeg", 20] < sizes["jpeg", 95] and sizes["webp", 20] < sizes["webp", 95]


def test_what_is_no_picture_gets_no_other_format(media: dict[str, bytes]) -> None:
    for content in (b"", media["png"][:120], media["mp4"]):
        with pytest.raises(ArtifactError, match="not a whole PNG picture"):
            finished(content, SaveAs(format="jpeg"), LONG)


def test_settings_that_a_jpeg_cannot_hold_are_refused(media: dict[str, bytes]) -> None:
    many = dataclasses.replace(SETTINGS, adapters={f"ink-{n:05d}": 1.0 for n in range(5_000)})
    with pytest.raises(RequestError, match="but a segment of a jpeg has 65533; set format"):
        finished(media["png"], SaveAs(format="jpeg"), many)
    assert finished(media["png"], SaveAs(format="webp"), many).startswith(b"RIFF")


# ---- what is asked for ---------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "format": "png",
    "quality": None,
    "label": None,
    "size": (96, 64),
    "prompts": ["a fox"],
    "is_from_prompt": True,
}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"format": "gif"}, "format is 'gif', allowed are png, jpeg, webp"),
        ({"quality": 80}, "quality is 80, but a png has none to choose"),
        ({"format": "jpeg", "quality": 0}, "quality is 0, allowed are 1 to 100"),
        ({"format": "webp", "quality": True}, "quality is True, allowed are 1 to 100"),
        ({"label": "c2pa"}, "label is 'c2pa', allowed is iptc; leave it out for no label"),
        ({"format": "webp", "size": (16_384, 64)}, "16384x64 pixels, but a webp has edges of"),
        ({"format": "jpeg", "prompts": ["\U0001f98a" * 14_001]}, "takes 56006 bytes, but the"),
        ({"format": "jpeg", "prompts": ["<" * 14_000]}, "takes 56002 bytes, but the settings"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_runs(
    asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told.replace("(", r"\(")):
        choose_saving(**GOOD | asked)


def test_the_longest_prompt_of_a_jpeg_fits(media: dict[str, bytes]) -> None:
    prompt = "<" * 13_000
    save_as = choose_saving(**GOOD | {"format": "jpeg", "prompts": [prompt]})
    assert finished(media["png"], save_as, dataclasses.replace(SETTINGS, prompt=prompt))


def test_a_label_tells_a_painting_from_a_painted_over_picture() -> None:
    assert choose_saving(**GOOD).source_type == ""
    assert choose_saving(**GOOD | {"label": "iptc"}).source_type == PAINTED
    over = choose_saving(**GOOD | {"label": "iptc", "is_from_prompt": False})
    assert over.source_type == PAINTED_OVER


# ---- settings are untrusted ----------------------------------------------------------------


def webp_with(xmp: bytes, folder: Path) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "WEBP", xmp=xmp)
    path = folder / "made.webp"
    path.write_bytes(buffer.getvalue())
    return path


@pytest.mark.parametrize(
    "xmp",
    [
        b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>',
        b"<x><y></x>",
        b"<x>" + b" " * 2**20 + b"</x>",
        b"\xff\xfe<x/>",
    ],
)
def test_a_packet_that_is_no_plain_xml_is_refused(tmp_path: Path, xmp: bytes) -> None:
    with pytest.raises(RequestError, match="XMP packet"):
        settings_in(webp_with(xmp, tmp_path))


@pytest.mark.parametrize("num_bytes", [2, 4, 11, 24, 40, 200])
def test_a_file_that_is_cut_off_has_no_settings(
    media: dict[str, bytes], tmp_path: Path, num_bytes: int
) -> None:
    for format in ("jpeg", "webp"):
        path = tmp_path / f"cut.{format}"
        content = finished(media["png"], SaveAs(format=format), LONG)  # type: ignore[arg-type]
        path.write_bytes(content[:num_bytes])
        with pytest.raises(RequestError):
            read_settings(path)


def test_a_foreign_picture_has_no_settings(tmp_path: Path) -> None:
    path = webp_with(packet(source_type=PAINTED), tmp_path)
    assert settings_in(path) is None
    with pytest.raises(RequestError, match="carries no settings"):
        read_settings(path)

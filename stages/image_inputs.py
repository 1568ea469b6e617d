"""Pictures that a user gives: read within limits, turned upright, brought to one form.

A picture is known by its pixels from here on, not by its file: the same one under another name
or in another lossless format is the same input. What happens to each kind of file:

- turned as its EXIF orientation says; of several frames or pages the first one is taken
- grey, palette, CMYK, YCbCr and LAB become RGB; 16 bits a channel become 8
- transparency is laid over white in a picture, and over black in a mask
- colour profiles are not applied; one that is not sRGB is told

Whatever cannot be used is a `RequestError` that names the file. This module loads no torch.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from stages.errors import RequestError
from stages.input_files import InputLimits, content_of

__all__ = ["InputLimits", "InputPicture", "content_of", "read_mask", "read_picture"]

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""What is read, by Pillow's names. EPS and its like start other programs; they are not here."""

ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIGNATURES = (
    (0, b"<svg", "an SVG drawing"),
    (0, b"<?xml", "an SVG drawing or another XML file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"%!PS", "a PostScript file"),
    (0, b"\x1aE\xdf\xa3", "a video"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the picture itself"),
    (4, b"ftyphei", "a HEIC picture"),
    (4, b"ftyphev", "a HEIC picture"),
    (4, b"ftypmif1", "a HEIC picture"),
    (4, b"ftypavif", "an AVIF picture, which this Pillow was built without"),
    (4, b"ftyp", "a video"),
    (4, b"JXL ", "a JPEG XL picture"),
)
LIMITS = InputLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class InputPicture:
    """A picture that was read.

    Attributes:
        name: The argument that it was given for, such as `image`.
        pixels: Mode `RGB`, upright, transparency laid over white; a mask has mode `L`.
        alpha: Mode `L`, 0 where it is transparent; None where nothing is.
        warnings: What was left out or is not exact, in sentences.
    """

    name: str
    pixels: Image.Image
    alpha: Image.Image | None = None
    warnings: tuple[str, ...] = ()


def read_picture(
    source: object, *, name: str = "image", allow_urls: bool = False, limits: InputLimits = LIMITS
) -> InputPicture:
    """A picture out of a file or, where allowed, from a web address.

    Args:
        source: A path, a `file://` URL, or an `http(s)://` URL.
        name: The argument that it is given for; errors begin with it.

    Raises:
        RequestError: It cannot be read or is no picture; the message says which and why.
    """
    data, where = content_of(source, name, allow_urls, limits)
    image, told = _decoded(data, where, limits)
    told = [*told, *_profile_warning(image, where)]
    pixels, alpha = _as_rgb(_in_eight_bits(image, where))
    if alpha is not None and alpha.getextrema() == (0, 0):
        told.append(f"{where} is transparent everywhere: it is read as plain white")
    return InputPicture(name=name, pixels=pixels, alpha=alpha, warnings=tuple(told))


def read_mask(
    source: object,
    picture: InputPicture,
    *,
    name: str = "mask_image",
    allow_urls: bool = False,
    limits: InputLimits = LIMITS,
) -> InputPicture:
    """A mask for a picture: white is painted anew, black is kept, grey is in between.

    Args:
        source: As of `read_picture`; or the word `alpha`: where the picture is transparent.

    Raises:
        RequestError: It cannot be read, is of another size than the picture, or is all black.
    """
    told: list[str] = []
    if source == "alpha":
        where = f"{name} alpha"
        if picture.alpha is None:
            raise RequestError(
                f"{where}: {picture.name} has no transparent part; give a mask of its own, white "
                "where it is to be painted anew"
            )
        levels = Image.fromarray(255 - np.asarray(picture.alpha))
    else:
        data, where = content_of(source, name, allow_urls, limits)
        image, told = _decoded(data, where, limits)
        levels = _as_grey(_in_eight_bits(image, where))
    if levels.size != picture.pixels.size:
        found, wanted = (f"{w} x {h}" for w, h in (levels.size, picture.pixels.size))
        raise RequestError(
            f"{where} is {found} pixels, but {picture.name} is {wanted}; bring the mask to the "
            "size of the picture"
        )
    if levels.getextrema() == (0, 0):
        raise RequestError(
            f"{where} is black everywhere, so nothing would be painted anew; make white what is "
            "to change"
        )
    return InputPicture(name=name, pixels=levels, warnings=tuple(told))


# ---- pixels --------------------------------------------------------------------------------


def _decoded(data: bytes, where: str, limits: InputLimits) -> tuple[Image.Image, list[str]]:
    """The first frame, upright, in the mode of its file; and what there is to tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own limits are above ours
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except Image.DecompressionBombError as error:
            raise RequestError(f"{where} has too many pixels: {error}") from error
        except Exception as error:  # a decoder may fail in any way on bytes that are not its own
            raise RequestError(_no_picture(data, where, error)) from error
        width, height = image.size
        if not 0 < width * height <= limits.max_pixels:
            raise RequestError(
                f"{where} is {width} x {height} pixels, allowed are "
                f"{limits.max_pixels / 1e6:.0f} million; make it smaller"
            )
        told = _frames_warning(image, where)
        try:
            image.seek(0)
            image.load()
        except Exception as error:
            raise RequestError(
                f"{where} is cut off or damaged: {error}; save or copy it once more"
            ) from error
        turn = _turn(image)
        return (image if turn is None else image.transpose(turn)), told


def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _no_picture(data: bytes, where: str, error: Exception) -> str:
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n") if data[:1] in b"\xef \t\r\n<" else data[:64]
    for offset, signature, what in SIGNATURES:
        if start[offset:].startswith(signature):
            return f"{where} is {what}, which is not read; save it as PNG or JPEG"
    reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
    return f"{where} is no picture of a known kind{reason}; save it as PNG or JPEG"


def _frames_warning(image: Image.Image, where: str) -> list[str]:
    if image.format == "MPO":  # a photograph with a preview behind it
        return []
    try:
        count = getattr(image, "n_frames", 1)
    except Exception:  # what follows the first frame is damaged; the first one is what counts
        return [f"{where} is damaged behind its first frame, which is the one that is used"]
    return [f"{where} has {count} frames; the first one is used"] if count > 1 else []


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # EXIF that cannot be read turns nothing
        return None


def _profile_warning(image: Image.Image, where: str) -> list[str]:
    profile = image.info.get("icc_profile") or b""
    if image.mode == "CMYK":
        return [f"{where} is CMYK; its colours as RGB are an approximation"]
    if not profile or b"sRGB" in profile or "sRGB".encode("utf-16-be") in profile:
        return []
    return [f"{where} has a colour profile other than sRGB, which is not applied"]


def _in_eight_bits(image: Image.Image, where: str) -> Image.Image:
    """A picture whose channels have 8 bits; 16-bit values are rounded to the nearest of 256."""
    if image.mode == "F":
        raise RequestError(f"{where} holds floating-point values; save it with 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;"):
        return image
    values: Any = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise RequestError(
            f"{where} holds values from {low} to {high}, allowed are 16 bits; save it with 8 or 16"
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _as_rgb(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """RGB over white, and the alpha channel if anything is transparent."""
    if not image.has_transparency_data:
        return _bare(image.convert("RGB")), None
    rgba = image.convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return _bare(rgba.convert("RGB")), None
    ground = Image.new("RGBA", rgba.size, "white")
    return _bare(Image.alpha_composite(ground, rgba).convert("RGB")), _bare(alpha)


def _as_grey(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return _bare(image.convert("L"))
    rgba = image.convert("RGBA")
    ground = Image.new("RGBA", rgba.size, "black")
    return _bare(Image.alpha_composite(ground, rgba).convert("L"))


def _bare(image: Image.Image) -> Image.Image:
    """The pixels alone, without what else the file said."""
    return Image.frombytes(image.mode, image.size, image.tobytes())

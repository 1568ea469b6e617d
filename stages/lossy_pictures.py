"""A decoded PNG as JPEG or WebP, with texts where tools look for them; loads no torch."""

from __future__ import annotations

import io
import struct
from typing import Any

from PIL import Image

from stages.errors import ArtifactError, RequestError
from stages.saving import MAX_SEGMENT_NBYTES, SaveAs

_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_LONG, _UNDEFINED = 4, 7
_IFD_NBYTES = 2 + 12 + 4  # of one entry


def encoded(png: bytes, save_as: SaveAs, *, comment: str = "", xmp: bytes = b"") -> bytes:
    """A picture in another format.

    Args:
        save_as: Of JPEG or WebP.
        comment: Into EXIF's `UserComment`.
        xmp: A packet.

    Raises:
        ArtifactError: `png` is no picture that can be read.
        RequestError: A text is too long for a JPEG.
    """
    options: dict[str, Any] = {"quality": save_as.quality}
    if comment:
        options["exif"] = user_comment(comment)
    if xmp:
        options["xmp"] = xmp
    if save_as.format == "jpeg":
        _check_room(len(options.get("exif", b"")), len(xmp))
        options |= {"subsampling": 0, "optimize": True}  # full colour at edges
    else:
        options |= {"method": 4}
    buffer = io.BytesIO()
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
            picture.convert("RGB").save(buffer, save_as.format, **options)
    except (OSError, SyntaxError, ValueError) as error:
        raise ArtifactError(f"not a whole PNG picture: {error}; decode it again") from error
    return buffer.getvalue()


def user_comment(text: str) -> bytes:
    """EXIF data with one text, in UTF-16 and the data's own byte order, as EXIF 2.32 has it."""
    value = b"UNICODE\0" + text.encode("utf-16-be", "backslashreplace")
    second = 8 + _IFD_NBYTES
    first_ifd = struct.pack(">HHHIII", 1, _EXIF_IFD, _LONG, 1, second, 0)
    place = second + _IFD_NBYTES
    exif_ifd = struct.pack(">HHHIII", 1, _USER_COMMENT, _UNDEFINED, len(value), place, 0)
    return b"Exif\0\0MM\0*" + struct.pack(">I", 8) + first_ifd + exif_ifd + value


def _check_room(exif_nbytes: int, xmp_nbytes: int) -> None:
    nbytes = max(exif_nbytes, xmp_nbytes + 29)  # the packet's name goes before it
    if nbytes > MAX_SEGMENT_NBYTES:
        raise RequestError(
            f"the settings take {nbytes} bytes, but a segment of a jpeg has {MAX_SEGMENT_NBYTES}; "
            "set format to png or webp, which finds the picture in the store, or leave out "
            "embed_settings"
        )

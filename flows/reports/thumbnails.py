"""Small copies of pictures, as `data:` URLs that a page carries in itself."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image

from flows.reports.data import Item

logger = logging.getLogger(__name__)

EDGE = 256
SMALL_EDGE = 128
MOST_LARGE = 1000
"""With more pictures than this, thumbnails are small: 10,000 of them take some 40 MB."""

MAX_PIXELS = 2**28
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What reading a picture may raise."""

_QUALITY = 72
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small copy.

    Attributes:
        url: `data:image/webp;base64,...`; empty if the file is no picture that can be read.
        width, height: Of the picture itself; 0 if unknown.
        problem: Why there is no copy.
    """

    url: str
    width: int = 0
    height: int = 0
    problem: str = ""


def thumbnails(items: Sequence[Item]) -> list[Thumbnail]:
    """A small copy of each item, in their order; a file that cannot be read is no error."""
    edge = EDGE if len(items) <= MOST_LARGE else SMALL_EDGE
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="thumbnails") as pool:
        return list(pool.map(lambda item: _thumbnail(item, edge), items))


def _thumbnail(item: Item, edge: int) -> Thumbnail:
    if item.path is None:
        return Thumbnail("")
    if not item.path.exists():
        return Thumbnail("", problem="the file is gone")
    if item.media_type and not item.media_type.startswith("image/"):
        return Thumbnail("")
    try:
        with item.path.open("rb") as file:
            data, width, height = small_copy(file, edge)
    except UNREADABLE as error:
        logger.warning("no thumbnail of %s: %s", item.path, error)
        return Thumbnail("", problem="the file is no picture that can be read")
    return Thumbnail(data_url(data, "image/webp"), width, height)


def small_copy(file: BinaryIO, edge: int) -> tuple[bytes, int, int]:
    """A picture as WebP that fits into a square, and the picture's own width and height.

    Args:
        edge: Of the square, in pixels.

    Raises:
        One of `UNREADABLE`: It is no picture that can be read, or one of too many pixels.
    """
    with Image.open(file) as picture:
        width, height = picture.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width}x{height} pixels")
        picture.draft("RGB", (edge, edge))  # a JPEG is decoded at a smaller size
        small = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    small.thumbnail((edge, edge), Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=_QUALITY, method=2)
    return buffer.getvalue(), width, height


def data_url(data: bytes, media_type: str) -> str:
    """Bytes as a URL that needs no network."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"

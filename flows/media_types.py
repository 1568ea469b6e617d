"""The media type of a stored picture, clip or sound, by its first bytes."""

from __future__ import annotations

from typing import BinaryIO

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"WEBP", 8, "image/webp"),
    (b"WAVE", 8, "audio/wav"),
    (b"ftyp", 4, "video/mp4"),
    (b"\x1aE\xdf\xa3", 0, "video/webm"),
)


def media_type_of(file: BinaryIO) -> str:
    """Such as `image/png`; empty for what is no medium, such as tensors. Reads from the start."""
    file.seek(0)
    start = file.read(16)
    file.seek(0)
    for mark, offset, media_type in _STARTS:
        if start[offset : offset + len(mark)] == mark:
            is_riff = media_type in ("image/webp", "audio/wav")
            return media_type if not is_riff or start.startswith(b"RIFF") else ""
    return ""

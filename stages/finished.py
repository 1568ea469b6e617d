"""What decode made as the user's file: in its format, with its settings and its label inside.

The pixels of a PNG and the frames of an MP4 stay as they are. This module loads no torch.
"""

from __future__ import annotations

from stages.lossy_pictures import encoded
from stages.media import KEYWORD, Settings
from stages.png_text import with_texts
from stages.saving import SaveAs
from stages.xmp import PNG_KEYWORD, mp4_with_packet, packet


def finished(content: bytes, save_as: SaveAs, settings: Settings | None) -> bytes:
    """The bytes of a file; equal arguments give equal bytes.

    Args:
        content: A PNG picture, or an MP4 video for `mp4`.
        settings: Go into the file: for a PNG `parameters` as text and `exeunt` as JSON, for a JPEG
            and a WebP the first as EXIF's `UserComment` and the other in its XMP, for an MP4 the
            JSON as its comment.

    Raises:
        ArtifactError: `content` is neither.
        RequestError: The settings do not fit into a JPEG.
    """
    match save_as.format:
        case "png":
            return _png(content, save_as, settings)
        case "mp4":
            return _mp4(content, save_as, settings)
    return encoded(
        content,
        save_as,
        comment="" if settings is None else settings.as_parameters(),
        xmp=packet(
            settings="" if settings is None else settings.as_json(),
            source_type=save_as.source_type,
        ),
    )


def _png(png: bytes, save_as: SaveAs, settings: Settings | None) -> bytes:
    texts = {}
    if settings is not None:
        texts = {"parameters": settings.as_parameters(), KEYWORD: settings.as_json()}
    if xmp := packet(source_type=save_as.source_type):
        texts[PNG_KEYWORD] = xmp.decode()
    return with_texts(png, texts) if texts else png


def _mp4(mp4: bytes, save_as: SaveAs, settings: Settings | None) -> bytes:
    if settings is not None:
        from stages.mp4 import with_texts as with_comment

        mp4 = with_comment(mp4, {"comment": settings.as_json()})
    if xmp := packet(source_type=save_as.source_type):
        mp4 = mp4_with_packet(mp4, xmp)
    return mp4

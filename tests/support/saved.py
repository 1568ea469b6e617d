"""Pictures and videos as users get them: finished, and under a name in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.finished import finished
from stages.media import Settings, write_file
from stages.saving import SaveAs


def write_png(png: bytes, folder: Path, *, settings: Settings | None = None, **names: Any) -> Path:
    """Save a picture; `names` are those of `stages.media.write_file`."""
    return _write(png, folder, SaveAs(), settings, names)


def write_mp4(mp4: bytes, folder: Path, *, settings: Settings | None = None, **names: Any) -> Path:
    """Save a video."""
    return _write(mp4, folder, SaveAs(format="mp4"), settings, names)


def _write(
    content: bytes, folder: Path, save_as: SaveAs, settings: Settings | None, names: dict[str, Any]
) -> Path:
    return write_file(finished(content, save_as, settings), folder, save_as.extension, **names)

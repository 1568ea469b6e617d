"""Video files that tests give: without loss, so that what is read back is what was written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
from PIL import Image


def write_lossless(frames: Sequence[Image.Image], path: Path, rate: int = 16) -> Path:
    """Write RGB frames with FFV1, whatever their mode."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "bgr0"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(picture.convert("RGB"))))
        container.mux(stream.encode(None))
    return path

"""A user's pictures as artifacts: their pixels, raw, in the form of a stage's handover.

The bytes depend on the pixels alone, so the artifact's digest is the picture's: no request holds
a path. `stages.execute` gives what it finds in such an artifact to the pipeline as arguments.
This module loads no torch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from stages.artifacts import ArtifactStore
from stages.contracts import (
    HANDOVER_SCHEMA,
    MEDIA_STAGE,
    METADATA_KEY,
    ArtifactRef,
    StageResult,
    canonical_json,
)
from stages.safetensors_header import TensorBytes, write

Medium = Image.Image | Sequence[Image.Image]
"""A picture of mode `RGB` or `L`, or several in their order: references, or a video's frames."""


def put_media(store: ArtifactStore, media: Mapping[str, Medium]) -> StageResult:
    """Store media by the names of the pipeline's arguments; equal pixels give equal artifacts.

    Raises:
        ArtifactError: The store cannot be written.
    """
    artifacts = {name: _put(store, name, medium) for name, medium in media.items()}
    return StageResult(stage=MEDIA_STAGE, artifacts=artifacts)


def _put(store: ArtifactStore, name: str, medium: Medium) -> ArtifactRef:
    buffer = io.BytesIO()
    entries: dict[str, TensorBytes] = {}
    tree = _take_apart(medium, f"values.{name}", entries)
    document: dict[str, Any] = {
        "schema": HANDOVER_SCHEMA,
        "stage": MEDIA_STAGE,
        "tree": {"values": {"$dict": {name: tree}}, "groups": {"$dict": {}}},
        "facts": {},
    }
    write(buffer, entries, {METADATA_KEY: canonical_json(document).decode("ascii")})
    return store.put(buffer.getvalue())


def _take_apart(medium: Medium, path: str, entries: dict[str, TensorBytes]) -> Any:
    """The tree that `stages.codec` makes of the same pictures."""
    if isinstance(medium, Image.Image):
        width, height = medium.size
        shape = (height, width) if medium.mode == "L" else (height, width, len(medium.getbands()))
        data = memoryview(medium.tobytes())
        entries[path] = {"dtype": "uint8", "shape": shape, "data": data}
        return {"$picture": path, "mode": medium.mode}
    return [_take_apart(each, f"{path}.{n}", entries) for n, each in enumerate(medium)]

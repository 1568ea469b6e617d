"""Describes a stored artifact for people, without torch and without reading its pixels."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from stages.safetensors_header import HeaderError, read_header

MAX_JSON_NBYTES = 2**20
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def describe(path: Path) -> dict[str, JsonValue]:
    """What a file holds: `kind` is `safetensors`, `png`, `json` or `bytes`."""
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(PNG_SIGNATURE) and start[12:16] == b"IHDR":
        return {
            "kind": "png",
            "width": int.from_bytes(start[16:20], "big"),
            "height": int.from_bytes(start[20:24], "big"),
            "bit_depth": start[24],
        }
    try:
        header = read_header(path)
    except HeaderError:
        return _describe_json(path)
    return {
        "kind": "safetensors",
        "tensors": [
            {"name": name, "dtype": info.dtype, "shape": [*info.shape], "nbytes": info.nbytes}
            for name, info in header.tensors.items()
        ],
        "metadata": {key: header.metadata[key] for key in sorted(header.metadata)},
    }


def _describe_json(path: Path) -> dict[str, JsonValue]:
    if path.stat().st_size <= MAX_JSON_NBYTES:
        try:
            return {"kind": "json", "value": json.loads(path.read_bytes().decode("utf-8"))}
        except (ValueError, RecursionError):
            pass
    return {"kind": "bytes"}

"""The header of a GGUF file: which tensors it holds, of which shape and type. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from stages.errors import ModelError

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
}  # fmt: skip
"""What diffusers computes with, by GGML's number: name, elements in a block, bytes of a block."""

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_ALIGNMENT = "general.alignment"
_MOST_ITEMS = 1 << 24
_LONGEST = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says of its tensors.

    Attributes:
        shapes: By name, in torch's order of axes; of the numbers, not of the packed bytes.
        nbytes: Bytes of all tensors as stored.
        digest: sha256 over the header's own bytes.
    """

    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    digest: str


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a header, and the file's size by it.

    Raises:
        ModelError: It is no GGUF file, incomplete, or of a type that nothing here computes with.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return _read(file, size, path)
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelError(
                f"GGUF file ends in its header, at {size} bytes: {path}; incomplete download?"
            ) from error


def _read(file: BinaryIO, size: int, path: Path) -> GgufHeader:
    if (magic := file.read(4)) != b"GGUF":
        raise ModelError(f"not a GGUF file: it begins with {magic!r}: {path}; fetch it again")
    version, num_tensors, num_entries = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise ModelError(
            f"GGUF version is {version}, allowed are 2 and 3: {path}; convert it again"
        )
    if max(num_tensors, num_entries) > _MOST_ITEMS:
        raise ModelError(f"GGUF header counts {num_tensors} tensors: {path}; the file is damaged")
    alignment = 32
    for _ in range(num_entries):
        key, kind = _text(file), _number(file, "<I")
        if key == _ALIGNMENT and kind == _UINT32:
            alignment = _number(file, "<I") or 32
        else:
            _skip(file, kind, path)
    shapes: dict[str, tuple[int, ...]] = {}
    nbytes = end = 0
    for _ in range(num_tensors):
        name, num_axes = _text(file), _number(file, "<I")
        axes = struct.unpack(f"<{num_axes}Q", file.read(8 * num_axes))
        kind, offset = struct.unpack("<IQ", file.read(12))
        if kind not in TYPES:
            known = ", ".join(each for each, _, _ in TYPES.values())
            raise ModelError(
                f"tensor {name!r} has GGML type {kind}, diffusers reads {known}: {path}; "
                "take a file of another quantization"
            )
        _, per_block, block_nbytes = TYPES[kind]
        held = prod(axes) // per_block * block_nbytes
        shapes[name] = tuple(reversed(axes))
        nbytes, end = nbytes + held, max(end, offset + held)
    start = -(-file.tell() // alignment) * alignment
    if size < start + end:
        raise ModelError(
            f"GGUF file has {size} bytes, its header describes {start + end}: {path}; "
            "incomplete download?"
        )
    length = file.tell()
    file.seek(0)
    digest = hashlib.sha256(file.read(length)).hexdigest()
    return GgufHeader(shapes=shapes, nbytes=nbytes, digest=digest)


def _number(file: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])


def _text(file: BinaryIO) -> str:
    length = _number(file, "<Q")
    content = file.read(min(length, _LONGEST))
    if len(content) != length:
        raise struct.error("short")
    return content.decode("utf-8")


def _skip(file: BinaryIO, kind: int, path: Path) -> None:
    """Pass over one value of the metadata."""
    if kind == _STRING:
        _text(file)
    elif kind == _ARRAY:
        item, count = _number(file, "<I"), _number(file, "<Q")
        if item in _SCALARS:
            file.seek(_SCALARS[item] * count, os.SEEK_CUR)
        else:
            for _ in range(min(count, _MOST_ITEMS)):
                _skip(file, item, path)
    elif kind in _SCALARS:
        file.seek(_SCALARS[kind], os.SEEK_CUR)
    else:
        raise ModelError(f"GGUF header has a value of type {kind}: {path}; the file is damaged")

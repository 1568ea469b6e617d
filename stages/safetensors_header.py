"""Safetensors files without torch: headers read and checked, files written the same each time.

The library's own writer puts metadata in a random order, so that equal tensors would get
unequal digests. This one sorts everything.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

MAX_HEADER_NBYTES = 100_000_000
"""What safetensors readers accept; a longer header is written by nobody and read by nobody."""

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element, by the format's own dtype names."""

TORCH_DTYPES = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64",
    "float32": "F32", "int32": "I32", "uint32": "U32",
    "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The format's dtype names by torch's."""


class HeaderError(ValueError):
    """A safetensors file is incomplete, malformed, or could not be read back."""


class TensorBytes(TypedDict):
    """One tensor to write: little-endian, contiguous, C order.

    `dtype` is torch's name or the format's (`bfloat16`, `BF16`).
    """

    dtype: str
    shape: Sequence[int]
    data: bytes | bytearray | memoryview[Any]


class Sink(Protocol):
    """What `write` needs of a stream."""

    def write(self, data: bytes | memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: The format's name, such as `BF16`.
        shape: Elements along each axis.
        begin: First byte, counted from the start of the file.
        end: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A safetensors header: tensors in file order, metadata, and the header's own bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def pack(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> bytes:
    """A whole safetensors file as bytes; equal arguments give equal bytes in every process.

    Raises:
        HeaderError: The file could not be read back: see `header_bytes`.
    """
    return b"".join(_pieces(tensors, metadata))


def write(sink: Sink, tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> int:
    """Write what `pack` returns, one tensor at a time, and return its size in bytes.

    Raises:
        HeaderError: Before the first byte is written: see `header_bytes`.
    """
    nbytes = 0
    for piece in _pieces(tensors, metadata):
        sink.write(piece)
        nbytes += len(piece)
    return nbytes


def _pieces(
    tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield header_bytes(tensors, metadata)
    for name in _file_order(tensors):
        data = memoryview(tensors[name]["data"])
        if data.nbytes:  # a view without elements cannot be cast
            yield data.cast("B")


def header_bytes(tensors: Mapping[str, TensorBytes], metadata: Mapping[str, str]) -> bytes:
    """The file up to its first tensor byte: length, JSON, padding to a multiple of 8.

    Raises:
        HeaderError: A name or a metadata entry is not Unicode text, a dtype is unknown, the
            data do not fill the shape, or the header exceeds `MAX_HEADER_NBYTES`.
    """
    document: dict[str, Any] = {}
    if metadata:
        document["__metadata__"] = {key: _text(metadata[key], key) for key in sorted(metadata)}
        for key in metadata:
            _text(key, key)
    offset = 0
    for name in _file_order(tensors):
        if name == "__metadata__":
            raise HeaderError("a tensor cannot be named __metadata__; rename it")
        tensor = tensors[name]
        dtype, shape = _dtype(tensor["dtype"], name), [int(size) for size in tensor["shape"]]
        nbytes = memoryview(tensor["data"]).nbytes
        if nbytes * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
            raise HeaderError(
                f"tensor {name!r} of shape {shape} and dtype {dtype} needs "
                f"{math.prod(shape) * DTYPE_BITS[dtype] / 8:g} bytes but has {nbytes} bytes"
            )
        document[_text(name, name)] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise HeaderError(
            f"header of {len(text)} bytes for {len(tensors)} tensors exceeds the "
            f"{MAX_HEADER_NBYTES} bytes that readers accept; write fewer, larger tensors"
        )
    return len(text).to_bytes(8, "little") + text


def _file_order(tensors: Mapping[str, TensorBytes]) -> list[str]:
    """Wide elements first, so that each tensor starts at a multiple of its element size."""
    return sorted(
        tensors, key=lambda name: (-DTYPE_BITS[_dtype(tensors[name]["dtype"], name)], name)
    )


def _dtype(dtype: str, name: str) -> str:
    code = TORCH_DTYPES.get(dtype, dtype)
    if code not in DTYPE_BITS:
        raise HeaderError(f"tensor {name!r} has dtype {dtype!r}, which safetensors does not know")
    return code


def _text(value: object, key: object) -> str:
    """A string that every reader accepts: JSON would carry a lone surrogate, Rust refuses it."""
    if not isinstance(value, str) or not isinstance(key, str):
        raise HeaderError(f"metadata {key!r} is {type(value).__name__}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HeaderError(f"metadata or name {key!r} is not valid Unicode: {error}") from error
    return value


def read_header(path: Path) -> Header:
    """Read and check a file's header against its size; the tensors' bytes are not read.

    Raises:
        HeaderError: The file is cut off, or is not a safetensors file.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == 0:
            raise HeaderError(f"file is empty (0 bytes): {path}; incomplete download?")
        first = file.read(8)
        if len(first) < 8:
            raise HeaderError(
                f"file has {nbytes} bytes, a safetensors file has at least 10 bytes: {path}; "
                "incomplete download?"
            )
        length = int.from_bytes(first, "little")
        if length > MAX_HEADER_NBYTES:
            raise HeaderError(
                f"not a safetensors file: its first 8 bytes give a header of {length} bytes, "
                f"{MAX_HEADER_NBYTES} bytes are allowed: {path}"
            )
        if 8 + length > nbytes:
            raise HeaderError(
                f"file has {nbytes} bytes but its header alone needs {8 + length} bytes: {path}; "
                "incomplete download?"
            )
        raw = file.read(length)
    return _parse(raw, nbytes, path)


def _parse(raw: bytes, nbytes: int, path: Path) -> Header:
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"header is not JSON: {path}: {error}; damaged file?") from error
    if not isinstance(document, dict):
        raise HeaderError(f"header is a JSON {type(document).__name__}, not an object: {path}")
    metadata = document.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError(f"header has metadata that is not text: {path}")
    start = 8 + len(raw)
    found = [(name, _tensor_info(name, entry, start, path)) for name, entry in document.items()]
    found.sort(key=lambda item: (item[1].begin, item[1].end))
    position = start
    for name, info in found:
        if info.begin != position:
            raise HeaderError(
                f"tensor {name!r} begins at byte {info.begin}, expected {position}: {path}; "
                "damaged file?"
            )
        position = info.end
    if position != nbytes:
        hint = "incomplete download?" if nbytes < position else "damaged file?"
        raise HeaderError(
            f"file has {nbytes} bytes, its header describes {position} bytes: {path}; {hint}"
        )
    return Header(tensors=dict(found), metadata=metadata, raw=raw)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor_info(name: str, entry: Any, start: int, path: Path) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        known = dtype in DTYPE_BITS and all(type(n) is int and n >= 0 for n in sizes)
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise HeaderError(f"header entry of tensor {name!r} is malformed: {path}; damaged file?")
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise HeaderError(
            f"tensor {name!r} of shape {shape} and dtype {dtype} has {end - begin} bytes: {path}; "
            "damaged file?"
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)

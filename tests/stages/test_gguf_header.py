"""GGUF headers, read without any library and held to the file's size."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from stages.errors import ModelError
from stages.gguf_header import read_gguf_header

F32, Q8_0, IQ4_NL = 0, 8, 20


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(
    tensors: list[tuple[str, tuple[int, ...], int, int]],
    *,
    entries: tuple[bytes, ...] = (),
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file of tensors (name, GGML's order of axes, type, bytes), each at the next offset."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for name, axes, kind, nbytes in tensors:
        head += text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)
        offset += -(-nbytes // alignment) * alignment
    return head + bytes(-len(head) % alignment) + bytes(offset)


TENSORS = [("a.weight", (64, 3), Q8_0, 204), ("a.bias", (3,), F32, 12)]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_tensors_are_told_by_their_shapes(tmp_path: Path) -> None:
    entries = (
        text("general.architecture") + struct.pack("<I", 8) + text("flux"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("list") + struct.pack("<IIQ", 9, 5, 3) + bytes(12),
        text("texts") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("é"),
        text("flag") + struct.pack("<I?", 7, True),
        text("number") + struct.pack("<Id", 12, 1.5),
    )
    content = gguf(TENSORS, entries=entries, alignment=64)
    found = read_gguf_header(write(tmp_path / "x.gguf", content))
    assert found.shapes == {"a.weight": (3, 64), "a.bias": (3,)}
    assert found.nbytes == 216


def test_the_digest_is_that_of_the_header(tmp_path: Path) -> None:
    content = gguf(TENSORS)
    one = read_gguf_header(write(tmp_path / "1.gguf", content)).digest
    assert read_gguf_header(write(tmp_path / "2.gguf", content[:-1] + b"\x01")).digest == one
    other = gguf([("b.weight", (64, 3), Q8_0, 204), TENSORS[1]])
    assert read_gguf_header(write(tmp_path / "3.gguf", other)).digest != one


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf(TENSORS)[:-60], r"has \d+ bytes, its header describes \d+: .*incomplete download\?"),
        (gguf(TENSORS)[:40], r"ends in its header, at 40 bytes: .*incomplete download\?"),
        (gguf(TENSORS)[:10], r"ends in its header, at 10 bytes"),
        (gguf(TENSORS, magic=b"GGML"), r"begins with b'GGML'"),
        (gguf(TENSORS, version=1), r"version is 1, allowed are 2 and 3"),
        (gguf([("w", (32, 2), IQ4_NL, 36)]), r"'w' has GGML type 20, diffusers reads F32, F16"),
        (gguf([], entries=(text("x") + struct.pack("<I", 99),)), r"a value of type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), r"counts 1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1 << 60), r"ends in its header"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf_header(write(tmp_path / "x.gguf", content))

"""Text chunks of PNG files, put in and read out without touching a pixel; loads no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from stages.errors import ArtifactError, RequestError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_TEXT_NBYTES = 2**20
"""Of one text after inflation; other readers stop at the same size."""

MAX_TEXTS_NBYTES = 16 * 2**20
MAX_CHUNKS = 100_000
_TEXT_KINDS = (b"tEXt", b"zTXt", b"iTXt")


def with_texts(png: bytes, texts: Mapping[str, str]) -> bytes:
    """The same picture with texts in it, in place of texts with the same keywords.

    A text goes into a `tEXt` chunk if Latin-1 can hold it, else into an `iTXt` chunk, as UTF-8;
    halves of surrogate pairs are written as `\\udc80`. The texts stand before the pixels.

    Raises:
        ArtifactError: `png` is no whole PNG file.
    """
    chunks = list(_chunks(png))
    if len(chunks) < 3 or chunks[0][0] != b"IHDR" or chunks[-1][0] != b"IEND":
        raise ArtifactError(
            f"not a whole PNG picture: {len(png)} bytes, {len(chunks)} chunks; decode it again"
        )
    pieces = [SIGNATURE, chunks[0][1]]
    pieces += [_text_chunk(keyword, text) for keyword, text in texts.items()]
    for kind, chunk in chunks[1:]:
        keyword = chunk[8:].partition(b"\0")[0].decode("latin-1")
        if kind not in _TEXT_KINDS or keyword not in texts:
            pieces.append(chunk)
    return b"".join(pieces)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and whole bytes of each chunk; ends early where the file is cut off."""
    if not png.startswith(SIGNATURE):
        return
    position = len(SIGNATURE)
    while position + 12 <= len(png):
        length = int.from_bytes(png[position : position + 4], "big")
        end = position + 12 + length
        if end > len(png):
            return
        yield png[position + 4 : position + 8], png[position:end]
        position = end


def _text_chunk(keyword: str, text: str) -> bytes:
    text = text.replace("\0", "\ufffd")  # no chunk can hold one
    head = keyword.encode("latin-1") + b"\0"
    try:
        kind, data = b"tEXt", head + text.encode("latin-1")
    except UnicodeEncodeError:
        # not compressed, no language, no translated keyword
        kind, data = b"iTXt", head + b"\0\0\0\0" + text.encode("utf-8", "backslashreplace")
    return chunk(kind, data)


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk with its length and checksum."""
    checksum = zlib.crc32(kind + data)
    return len(data).to_bytes(4, "big") + kind + data + checksum.to_bytes(4, "big")


def read_texts(path: Path) -> dict[str, str]:
    """The texts of a PNG file, by keyword; the first of equal keywords counts.

    The file is not trusted: a text is at most 1 MiB after inflation, all texts 16 MiB.

    Raises:
        RequestError: It is no PNG file, is damaged, or exceeds a limit.
        OSError: It cannot be read.
    """
    texts: dict[str, str] = {}
    nbytes = 0
    with path.open("rb") as file:
        if file.read(8) != SIGNATURE:
            raise RequestError(f"not a PNG picture: {path}")
        for _ in range(MAX_CHUNKS):
            head = file.read(8)
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if len(head) < 8 or length > 2**31 - 1:
                raise RequestError(f"PNG picture is cut off: {path}")
            if kind == b"IEND":
                return texts
            if kind not in _TEXT_KINDS:
                file.seek(length + 4, 1)
                continue
            keyword, text = _read_text(file, kind, length, path)
            nbytes += len(text)
            if nbytes > MAX_TEXTS_NBYTES:
                raise RequestError(f"texts in a picture exceed {MAX_TEXTS_NBYTES} bytes: {path}")
            texts.setdefault(keyword, text)
    raise RequestError(f"PNG picture has more than {MAX_CHUNKS} chunks: {path}")


def _read_text(file: BinaryIO, kind: bytes, length: int, path: Path) -> tuple[str, str]:
    if length > MAX_TEXT_NBYTES:
        raise RequestError(
            f"text in a picture has {length} bytes, {MAX_TEXT_NBYTES} bytes are allowed: {path}"
        )
    data, checksum = file.read(length), file.read(4)
    if zlib.crc32(kind + data).to_bytes(4, "big") != checksum:
        raise RequestError(f"text in a picture is damaged: {path}")
    raw_keyword, _, rest = data.partition(b"\0")
    keyword, is_compressed = raw_keyword.decode("latin-1"), kind == b"zTXt"
    if kind == b"zTXt":
        rest = rest[1:]
    elif kind == b"iTXt":
        is_compressed = rest[:1] == b"\1"
        rest = rest[2:].partition(b"\0")[2].partition(b"\0")[2]
    if is_compressed:
        rest = _inflate(rest, path)
    return keyword, rest.decode("utf-8" if kind == b"iTXt" else "latin-1", "replace")


def _inflate(data: bytes, path: Path) -> bytes:
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, MAX_TEXT_NBYTES)
    except zlib.error as error:
        raise RequestError(f"text in a picture is damaged: {path}: {error}") from error
    if inflater.unconsumed_tail:
        raise RequestError(
            f"text in a picture inflates to more than {MAX_TEXT_NBYTES} bytes: {path}"
        )
    return text

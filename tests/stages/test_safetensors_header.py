"""Files that we write are the same each time, and every reader accepts them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from stages import safetensors_header
from stages.safetensors_header import (
    DTYPE_BITS,
    HeaderError,
    TensorBytes,
    pack,
    read_header,
    write,
)

SCRIPT = """
import hashlib
from stages.safetensors_header import pack
names = sorted({"b", "a", "latents"}, key=hash)
metadata = {name: name * 2 for name in sorted({"schema", "stage", "request", "producer"}, key=hash)}
tensors = {n: {"dtype": "BF16", "shape": (len(n),), "data": n.encode() * 2} for n in names}
print(hashlib.sha256(pack(tensors, metadata)).hexdigest())
"""


def test_equal_content_gives_equal_bytes_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(digests) == 1


@st.composite
def tensor_files(draw: st.DrawFn) -> dict[str, TensorBytes]:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    shapes = st.lists(st.integers(0, 4), max_size=3)
    whole = [dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0]
    tensors: dict[str, TensorBytes] = {}
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(whole)), draw(shapes)
        nbytes = DTYPE_BITS[dtype] // 8
        for size in shape:
            nbytes *= size
        data = draw(st.binary(min_size=nbytes, max_size=nbytes))
        tensors[name] = {"dtype": dtype, "shape": shape, "data": data}
    return tensors


deserialize: Any = safetensors.deserialize
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(tensors=tensor_files(), metadata=st.dictionaries(texts, texts, max_size=4))
def test_the_library_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, TensorBytes],
    metadata: dict[str, str],
) -> None:
    data = pack(tensors, metadata)

    theirs = {name: (info["shape"], bytes(info["data"])) for name, info in deserialize(data)}
    assert theirs == {n: ([*t["shape"]], bytes(t["data"])) for n, t in tensors.items()}

    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    assert header.metadata == metadata
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert (info.dtype, [*info.shape]) == (tensor["dtype"], [*tensor["shape"]])
        assert data[info.begin : info.end] == bytes(tensor["data"])
        assert info.nbytes == 0 or info.begin % min(8, DTYPE_BITS[info.dtype] // 8) == 0


def test_packed_elements_smaller_than_a_byte_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({"q": {"dtype": "F4", "shape": (2, 4), "data": b"abcd"}}, {}))

    assert read_header(path).tensors["q"].shape == (2, 4)


def test_torch_names_of_dtypes_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({"x": {"dtype": "bfloat16", "shape": (1,), "data": b"ab"}}, {}))

    assert read_header(path).tensors["x"].dtype == "BF16"


def test_what_is_streamed_equals_what_is_packed(tmp_path: Path) -> None:
    tensors: dict[str, TensorBytes] = {
        "a": {"dtype": "U8", "shape": (3,), "data": b"abc"},
        "b": {"dtype": "F32", "shape": (1, 2), "data": memoryview(b"12345678").cast("f", (1, 2))},
        "c": {"dtype": "I64", "shape": (0, 5), "data": bytearray()},
    }
    path = tmp_path / "x.safetensors"

    with path.open("wb") as file:
        nbytes = write(file, tensors, {"k": "v"})

    assert path.read_bytes() == pack(tensors, {"k": "v"})
    assert nbytes == path.stat().st_size


class Refusing:
    """A sink that must not be written to."""

    def write(self, data: bytes | memoryview, /) -> int:
        raise AssertionError(f"{len(data)} bytes were written")


U8 = {"dtype": "U8", "shape": (1,), "data": b"x"}


@pytest.mark.parametrize(
    ("tensors", "metadata", "expected"),
    [
        ({"x": U8 | {"shape": (2,)}}, {}, "needs 2 bytes but has 1 bytes"),
        ({"x": U8 | {"dtype": "float128"}}, {}, "'float128', which safetensors does not know"),
        ({"__metadata__": U8}, {}, "cannot be named"),
        ({"\ud800": U8}, {}, "not valid Unicode"),
        ({}, {"k": "\udfff"}, "not valid Unicode"),
        ({}, {"\ud800": "v"}, "not valid Unicode"),
        ({}, {"k": 5}, "is int, not text"),
        ({f"tensor-{n}": U8 for n in range(100)}, {}, "header of .* bytes for 100 tensors exceeds"),
    ],
)
def test_a_file_that_no_reader_accepts_is_refused_before_the_first_byte(
    tensors: dict[str, Any], metadata: dict[str, Any], expected: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_NBYTES", 2000)

    with pytest.raises(HeaderError, match=expected):
        write(Refusing(), tensors, metadata)


def test_the_limit_is_the_librarys_own(tmp_path: Path) -> None:
    """One byte over the limit is refused by the library's reader, the limit itself is not."""
    limit = safetensors_header.MAX_HEADER_NBYTES

    for length, expected in [(limit, "invalid header length"), (limit + 1, "header too large")]:
        with pytest.raises(Exception, match=expected):
            deserialize(length.to_bytes(8, "little") + b" " * 64)


def _file(document: str, data: bytes = b"") -> bytes:
    text = document.encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_file("[]"), "JSON list"),
        (_file('{"__metadata__": {"k": 5}}'), "metadata that is not text"),
        (_file('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"xx"), "begins at"),
        (_file('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', b"x"), "shape .2."),
        (_file('{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 1]}}', b"x"), "malformed"),
        (_file('{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}', b"x"), "malformed"),
        (_file('{"a": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', b"x"), "malform"),
        (_file('{"a": {"dtype": "U8", "shape": [], "data_offsets": [0]}}', b"x"), "malformed"),
        (_file('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"xy"), "damaged"),
        (_file("[" * 5000), "not JSON"),
        (_file('{"\xff": 1}')[:-3] + b"\xff\xff}", "not JSON|malformed"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)

    with pytest.raises(HeaderError, match=expected) as caught:
        read_header(path)
    assert str(path) in str(caught.value)

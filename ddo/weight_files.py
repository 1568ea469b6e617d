"""Weight files in safetensors format: which there are, what they hold. Headers only, no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddo.errors import DdoError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_BASE_NAMES = ("diffusion_pytorch_model", "model")
_LFS = b"version https://git-lfs"
_AGAIN = "fetch the model again"


class SourceError(DdoError, ValueError):
    """Weights are missing, damaged, or not those that a module needs."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells a file from a later one of the same name."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | Path | int) -> FileIdentity:
        """The identity that a path, or an open file, has now. Raises OSError."""
        found = os.stat(path)  # noqa: PTH116 - a Path would be made only to be taken apart
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file; `offset` counts bytes from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The checked weight files of one model directory.

    Attributes:
        tensors: By name, over all files.
        identities: Of each file, when its header was read.
        variant: Such as `fp16`; None for the plain files.
        ignored: Safetensors files beside them that are not read.
    """

    tensors: dict[str, StoredTensor]
    identities: dict[Path, FileIdentity]
    variant: str | None
    ignored: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def verify(self) -> None:
        """Raise SourceError when a file is no longer the one whose header was read."""
        for path, identity in self.identities.items():
            try:
                now = FileIdentity.of(path)
            except OSError as error:
                raise SourceError(f"{path} has gone: {error.strerror}; load it again") from error
            if now != identity:
                raise SourceError(
                    f"{path} has changed since it was read ({identity.nbytes} bytes then, "
                    f"{now.nbytes} bytes now); load it again"
                )


def read_weight_files(directory: str | Path, variant: str | None = None) -> WeightFiles:
    """The weights of a component directory, or of one safetensors file.

    Args:
        variant: Such as `fp16`. Without one, the plain files or the only variant are taken.

    Raises:
        SourceError: They are missing, cut off, damaged, or contradict their index.
    """
    folder = Path(directory)
    if folder.is_file():
        return _collect([folder], None, ())
    if not folder.is_dir():
        raise SourceError(f"model directory is missing: {folder}; check the path")
    names = sorted(entry.name for entry in folder.iterdir())
    found = dict(_candidates(names))
    chosen = _choose(folder, found, variant)
    main = folder / found[chosen]
    if main.name.endswith(".json"):
        paths, weight_map = _read_index(main)
    else:
        paths, weight_map = [main], None
    ignored = tuple(
        folder / name
        for name in names
        if name.endswith(".safetensors") and folder / name not in paths
    )
    files = _collect(paths, chosen or None, ignored)
    if weight_map is not None:
        _hold_to_index(files, weight_map, main)
    return files


def _candidates(names: list[str]) -> Iterable[tuple[str, str]]:
    """Variant and file of each way to load; an index comes last and so wins over one file."""
    for base in _BASE_NAMES:
        for pattern in (
            rf"{base}(?:\.(?P<variant>[\w-]+))?\.safetensors",
            rf"{base}(?:\.(?P<variant>[\w-]+))?\.safetensors\.index\.json",
            rf"{base}\.safetensors\.index\.(?P<variant>[\w-]+)\.json",
        ):
            for name in names:
                match = re.fullmatch(pattern, name)
                if match and "-of-" not in name:
                    yield match["variant"] or "", name


def _choose(folder: Path, found: dict[str, str], variant: str | None) -> str:
    if variant is not None and variant in found:
        return variant
    if variant is None and "" in found:
        return ""
    if variant is None and len(found) == 1:
        return next(iter(found))
    if found:
        available = ", ".join(sorted(name or "(none)" for name in found))
        wanted = f"variant {variant!r} is missing" if variant else "there are several variants"
        raise SourceError(f"{wanted}: {folder} has {available}; name one of these")
    wanted = " or ".join(f"{base}.safetensors" for base in _BASE_NAMES)
    raise SourceError(f"weights are missing: neither {wanted} nor an index in {folder}; {_AGAIN}")


def _read_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
        is_local = all(shard == Path(shard).name for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"shard index is damaged: {path}: {error!r}; {_AGAIN}") from error
    if not is_local:
        raise SourceError(f"shard index names files outside of its folder: {path}; {_AGAIN}")
    missing = [shard for shard in shards if not (path.parent / shard).is_file()]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(shards)} shards are missing: {some(missing)}: {path}; {_AGAIN}"
        )
    return [path.parent / shard for shard in shards], weight_map


def _hold_to_index(files: WeightFiles, weight_map: dict[str, str], index: Path) -> None:
    absent = [
        f"{name} in {shard}"
        for name, shard in weight_map.items()
        if name not in files.tensors or files.tensors[name].path.name != shard
    ]
    if absent:
        raise SourceError(
            f"index promises {len(absent)} tensors that its shards do not hold: {some(absent)}: "
            f"{index}; index and shards belong to different models"
        )
    unlisted = [name for name in files.tensors if name not in weight_map]
    if unlisted:
        raise SourceError(
            f"shards hold {len(unlisted)} tensors that their index does not list: "
            f"{some(unlisted)}: {index}; the index is incomplete or of another model"
        )


def _collect(paths: list[Path], variant: str | None, ignored: tuple[Path, ...]) -> WeightFiles:
    tensors: dict[str, StoredTensor] = {}
    identities: dict[Path, FileIdentity] = {}
    for path in paths:
        identities[path] = FileIdentity.of(path)
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise SourceError(
                    f"tensor {tensor.name!r} is in {tensors[tensor.name].path} and in {path}; "
                    f"{_AGAIN}"
                )
            tensors[tensor.name] = tensor
    return WeightFiles(tensors=tensors, identities=identities, variant=variant, ignored=ignored)


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in file order, checked against its size.

    Raises:
        SourceError: The file is cut off, damaged, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            is_pointer = _LFS.startswith(first) and len(first) == 8
            fits = len(first) == 8 and length <= min(MAX_HEADER_BYTES, nbytes - 8)
            raw = file.read(length) if fits else b""
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    if is_pointer:
        raise SourceError(
            f"{path} is a Git LFS pointer of {nbytes} bytes, not the weights; fetch them with "
            "`git lfs pull`"
        )
    if not fits:
        expected = f"its header alone needs {8 + length}" if len(first) == 8 else "8 are the least"
        raise SourceError(f"file has {nbytes} bytes, {expected}: {path}; incomplete download?")
    try:
        document = json.loads(raw)
        document.pop("__metadata__", None)
        tensors = [_stored(name, entry, 8 + length, path) for name, entry in document.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceError(f"header is damaged: {path}: {error}; {_AGAIN}") from error
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            raise SourceError(
                f"tensor {tensor.name!r} begins at byte {tensor.offset}, expected {end}: {path}; "
                f"{_AGAIN}"
            )
        end += tensor.nbytes
    if end != nbytes:
        hint = "incomplete download?" if nbytes < end else "damaged file?"
        raise SourceError(f"file has {nbytes} bytes, its header describes {end}: {path}; {hint}")
    return tensors


def _stored(name: str, entry: Any, start: int, path: Path) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"tensor {name!r} has sizes that are no counts")
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise ValueError(f"tensor {name!r} of {dtype} {shape} has {end - begin} bytes")
    return StoredTensor(
        name=name, path=path, dtype=dtype, shape=shape, offset=start + begin, nbytes=end - begin
    )


def some(names: list[str], most: int = 5) -> str:
    """The first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""Where each tensor's bytes lie: in a mapped weight file, or in memory of its own.

Two ways lead there. A module on `meta` is bound to weight files by name, strictly: nothing may
be missing, left over or of another shape. A module that a library has loaded is asked by
address: what safetensors mapped, the kernel knows by file and offset, whatever the library
renamed or tied.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ddo.process_maps import MAPS, mapped_spans
from ddo.weight_files import FileIdentity, SourceError, StoredTensor, WeightFiles, some

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file that are mapped into this process."""

    path: str
    offset: int
    nbytes: int
    identity: FileIdentity


class PageFlags:
    """The kernel's table of this process's pages. Linux only."""

    def __init__(self) -> None:
        self._file = -1
        try:
            self._file = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return

    def close(self) -> None:
        """Close the table."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def is_private(self, address: int, nbytes: int = 1) -> bool:
        """Whether any of these bytes is on a page of this process's own, not of a file."""
        first, last = address // _PAGE, (address + nbytes - 1) // _PAGE
        try:
            table = os.pread(self._file, (last - first + 1) * 8, first * 8)
        except OSError:
            return False
        if len(table) == 8:
            entry = int.from_bytes(table, "little")
            return bool(entry & _PRESENT) and not entry & _OF_FILE
        if not table:
            return False
        entries = torch.frombuffer(bytearray(table), dtype=torch.int64)  # a million pages in 4 GiB
        is_present = (entries & (_PRESENT - (1 << 64))) != 0
        return bool((is_present & ((entries & _OF_FILE) == 0)).any())


_PAGE = mmap.PAGESIZE
_OF_FILE = 1 << 61
_PRESENT = 3 << 62  # in memory, or swapped out


class MappedFiles:
    """The files that are mapped into this process now, to be asked by address. Linux only."""

    def __init__(self, maps: Path = MAPS) -> None:
        self._identities: dict[str, FileIdentity | None] = {}
        self._pages = PageFlags()
        weakref.finalize(self, self._pages.close)
        self._spans = [span for span in mapped_spans(maps) if span.path.startswith("/")]
        self._begins = [span.begin for span in self._spans]

    def find(self, address: int, nbytes: int) -> FileRange | None:
        """The file bytes at an address.

        None if there are none, if the file is another one now, or if this process has written
        to them: then its pages are no longer the file's.
        """
        at = bisect_right(self._begins, address) - 1 if self._spans else -1
        if at < 0 or not nbytes:
            return None
        span = self._spans[at]
        path = span.path
        if address + nbytes > span.end:
            return None
        if path not in self._identities:
            self._identities[path] = _identity(path)
        identity = self._identities[path]
        if identity is None or identity.inode != span.inode:
            return None
        start = span.offset + address - span.begin
        if self._pages.is_private(address, nbytes):
            return None
        if start + nbytes > identity.nbytes:
            return None
        return FileRange(path, start, nbytes, identity)


def _identity(path: str) -> FileIdentity | None:
    try:
        return FileIdentity.of(path)
    except OSError:
        return None


def byte_view(tensor: Tensor) -> Tensor | None:
    """The bytes of a dense CPU tensor as uint8 of shape `(nbytes,)`; None if it has holes."""
    if not is_dense(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def associate(
    module: nn.Module,
    files: WeightFiles,
    *,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    may_be_left: Iterable[str] = (),
) -> dict[str, StoredTensor]:
    """The stored tensor of every parameter and persistent buffer on `meta`, by module name.

    Args:
        rename: From a name of the module to the name in the files.
        may_be_left: Patterns of stored names that the module may leave unused.

    Returns:
        One entry for each distinct tensor; of tied ones, under the first name.

    Raises:
        SourceError: Tensors are missing, left over, or of another shape or kind.
    """
    owners = _distinct(module)
    translate = _translation(owners, files, rename)
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for names, tensor in owners:
        stored = [translate(name) for name in names if translate(name) in files.tensors]
        used.update(stored)
        if stored:
            _check_same(names[0], tensor, files.tensors[stored[0]])
            found[names[0]] = files.tensors[stored[0]]
        elif tensor.is_meta:
            missing.append(names[0])
    allowed = [re.compile(pattern) for pattern in may_be_left]
    extra = [n for n in files.tensors if n not in used and not any(p.search(n) for p in allowed)]
    _refuse(module, files, missing, extra)
    return found


def every_tensor_is_stored(module: nn.Module, found: Mapping[str, StoredTensor]) -> bool:
    """Whether an association leaves no persistent tensor with the values of its making."""
    return all(names[0] in found for names, _ in _distinct(module))


def _refuse(module: nn.Module, files: WeightFiles, missing: list[str], extra: list[str]) -> None:
    where = next(iter(files.identities)).parent
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing: {some(missing)}")
    if extra:
        parts.append(f"{len(extra)} tensors are left over: {some(extra)}")
    if parts:
        raise SourceError(
            f"weights do not fit {type(module).__name__}: {'; '.join(parts)}: {where}; "
            "check that configuration and weights belong together"
        )


def _distinct(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every parameter and persistent buffer once, with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        temporary = child._non_persistent_buffers_set
        members = [
            *child._parameters.items(),
            *((n, b) for n, b in child._buffers.items() if n not in temporary),
        ]
        for name, tensor in members:
            if tensor is not None:
                found.setdefault(id(tensor), ([], tensor))[0].append(dot + name)
    return list(found.values())


def _translation(
    owners: list[tuple[list[str], Tensor]],
    files: WeightFiles,
    rename: Callable[[str], str] | Mapping[str, str] | None,
) -> Callable[[str], str]:
    if isinstance(rename, Mapping):
        table = rename
        return lambda name: table.get(name, name)
    if rename is not None:
        return rename
    names = [name for all_names, _ in owners for name in all_names]
    if any(name in files.tensors for name in names):
        return lambda name: name
    # A model saved from inside a wrapper carries the wrapper's name in front, or lacks it.
    heads = sorted({name.split(".", 1)[0] + "." for name in files.tensors if "." in name})
    for head in heads:
        if all(stored.startswith(head) for stored in files.tensors):
            return lambda name: head + name
    tops = {name.split(".", 1)[0] + "." for name in names}
    if len(tops) == 1:
        top = tops.pop()
        return lambda name: name.removeprefix(top)
    return lambda name: name


def _check_same(name: str, tensor: Tensor, stored: StoredTensor) -> None:
    if tuple(tensor.shape) != stored.shape:
        raise SourceError(
            f"tensor {name!r} has shape {stored.shape} in {stored.path}, the module expects "
            f"{tuple(tensor.shape)}; check that configuration and weights belong together"
        )
    dtype = torch_dtype(stored)
    if dtype.is_floating_point != tensor.dtype.is_floating_point:
        raise SourceError(
            f"tensor {name!r} is {dtype} in {stored.path}, the module expects {tensor.dtype}; "
            "quantized weights need the library that made them"
        )


def torch_dtype(stored: StoredTensor) -> torch.dtype:
    """The dtype of a stored tensor. Raises SourceError when torch has none."""
    if stored.dtype not in _DTYPES:
        raise SourceError(
            f"tensor {stored.name!r} has dtype {stored.dtype}, which torch does not know: "
            f"{stored.path}; convert the weights"
        )
    return _DTYPES[stored.dtype]


def materialize(module: nn.Module, files: WeightFiles, found: Mapping[str, StoredTensor]) -> None:
    """Put mapped file bytes in place of the tensors on `meta`; ties stay ties.

    The mapping is private: a write to a weight changes this process's copy of its page, never
    the file. No byte is read here.

    Raises:
        SourceError: A file has changed, or a tensor is left without values.
    """
    files.verify()
    memories = {
        path: torch.from_file(str(path), shared=False, size=identity.nbytes, dtype=torch.uint8)
        for path, identity in files.identities.items()
        if identity.nbytes
    }
    files.verify()
    made: dict[int, Tensor] = {}
    for names, tensor in _distinct(module):
        stored = found.get(names[0])
        if stored is not None:
            made[id(tensor)] = _typed(memories[stored.path], stored)
    with torch.inference_mode(False):
        _replace(module, made)
    refuse_uninitialised(module)


def _typed(memory: Tensor, stored: StoredTensor) -> Tensor:
    dtype = torch_dtype(stored)
    raw = memory[stored.offset : stored.offset + stored.nbytes]
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # a header of odd length: the processor wants whole elements
    return raw.view(dtype).view(stored.shape)


def _replace(module: nn.Module, made: Mapping[int, Tensor]) -> None:
    parameters: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and id(parameter) in made:
                key = id(parameter)
                if key not in parameters:
                    parameters[key] = nn.Parameter(made[key], requires_grad=False)
                child._parameters[name] = parameters[key]
        for name, buffer in child._buffers.items():
            if buffer is not None and id(buffer) in made:
                child._buffers[name] = made[id(buffer)]


def refuse_uninitialised(module: nn.Module) -> None:
    """Raise SourceError when a parameter or buffer has no values."""
    empty = [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta]
    if empty:
        raise SourceError(
            f"{len(empty)} tensors of {type(module).__name__} have no values: {some(empty)}; "
            "check that configuration and weights belong together"
        )

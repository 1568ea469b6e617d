"""The bytes of weights as a device may read them by itself: shared, read-only file mappings.

A weight that lies in a mapped file is found by its address, which needs no names. Where the
kernel does not tell (stacked file systems give a mapping another inode than its path), files
that are known to hold the weights are asked by name, and believed if the bytes are the same.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ddo.source import FileRange, MappedFiles
from ddo.weight_files import FileIdentity, WeightFiles

_COMPARED_BYTES = 256  # at the beginning, the middle and the end of a weight


class HostSources:
    """Files by which weights in host memory are backed.

    Args:
        hints: Files that the weights may have come from.
        mapped: What the kernel says is mapped; read now by default.
    """

    def __init__(self, hints: WeightFiles | None = None, mapped: MappedFiles | None = None) -> None:
        self._mapped = MappedFiles() if mapped is None else mapped
        self._hints = hints
        self._files: dict[str, tuple[int, Tensor] | None] = {}

    def locate(self, names: Iterable[str], memory: Tensor) -> tuple[int, int, Tensor] | None:
        """Number of the file, offset in it, and the file's bytes; None if no file has the same.

        Args:
            names: Of the weight in the module; several if it is tied.
            memory: Its bytes, uint8 of shape `(nbytes,)`.
        """
        source = self._mapped.find(memory.data_ptr(), memory.numel())
        if source is not None:
            found = self._open(source.path, source.identity)
            if found is not None:
                return found[0], source.offset, found[1]
        by_name = (self._by_name(name, memory) for name in names)
        return next((found for found in by_name if found is not None), None)

    def _by_name(self, name: str, memory: Tensor) -> tuple[int, int, Tensor] | None:
        stored = self._hints.tensors.get(name) if self._hints is not None else None
        if self._hints is None or stored is None or stored.nbytes != memory.numel():
            return None
        found = self._open(str(stored.path), self._hints.identities[stored.path])
        if found is None:
            return None
        bytes_there = found[1][stored.offset : stored.offset + stored.nbytes]
        middle = max(0, stored.nbytes // 2 - _COMPARED_BYTES)
        last = max(0, stored.nbytes - _COMPARED_BYTES)
        for begin in (0, middle, last):
            part = slice(begin, begin + _COMPARED_BYTES)
            if not torch.equal(memory[part], bytes_there[part]):
                return None
        return found[0], stored.offset, found[1]

    def _open(self, path: str, identity: FileIdentity) -> tuple[int, Tensor] | None:
        if path not in self._files:
            memory = map_shared(Path(path), identity)
            self._files[path] = None if memory is None else (len(self._files), memory)
        return self._files[path]


def map_shared(path: Path, identity: FileIdentity) -> Tensor | None:
    """A file's bytes, read-only, shape `(size,)`; None if it is no longer that file.

    A device may read such pages directly where they are: a private mapping would be copied page
    by page. Writing through the tensor is a segmentation fault.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        if FileIdentity.of(path) != identity:
            return None
    except (OSError, ValueError):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written is the point
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    begin = memory.data_ptr()
    _shared[begin] = FileRange(str(path), 0, memory.numel(), identity)
    weakref.finalize(mapping, _shared.pop, begin, None).atexit = False
    return memory


# Files that this process has mapped with `map_shared` and still has, by address.
_shared: dict[int, FileRange] = {}


def file_behind(memory: Tensor) -> FileRange | None:
    """Where bytes of a `map_shared` tensor lie in their file, as it was when it was mapped."""
    address = memory.data_ptr()
    for begin, whole in list(_shared.items()):
        if begin <= address and address + memory.numel() <= begin + whole.nbytes:
            return FileRange(whole.path, address - begin, memory.numel(), whole.identity)
    return None

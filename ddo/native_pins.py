"""Host memory pinned through the native library: registered pages, and its pinned ring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import native
from ddo.source import FileRange
from ddo.staging import HostPiece, StagingSize
from ddo.weight_files import FileIdentity, SourceError


class NativeRegistrar:
    """Pins host pages through the native library, which unpins them whatever happens."""

    def __init__(self, device: native.Device) -> None:
        self._device = device
        self._pages: dict[int, native.HostPages] = {}

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> int:
        """Pin whole pages; the driver's status."""
        try:
            self._pages[address] = native.HostPages(
                self._device, address, nbytes, is_read_only=is_read_only
            )
        except native.CudaError as error:
            return error.status
        return 0

    def unregister(self, address: int) -> int:
        """Let pinned pages go. Pages that are not pinned are none to complain about."""
        self._pages.pop(address, None)
        return 0


class NativeStager:
    """The native library's pinned ring, and the files that it reads."""

    def __init__(self, device: native.Device, size: StagingSize) -> None:
        budget = native.HostBudget(limit_bytes=size.nbytes)
        self._ring = native.StagingRing(
            device,
            budget,
            num_buffers=size.num_buffers,
            buffer_bytes=size.buffer_bytes,
            num_threads=size.num_threads,
        )
        self._files: dict[str, native.FileMapping] = {}

    def batch(self, parts: Sequence[tuple[HostPiece, int]]) -> native.StagedBatch:
        """Copies of pieces to device addresses, by their tiers.

        Raises:
            SourceError: A file is no longer the one that the weights were found in.
        """
        direct = [(*span(p.memory), to) for p, to in parts if p.is_pinned]
        own = [(*span(p.memory), to) for p, to in parts if not p.is_pinned and p.file is None]
        from_files = [
            (self._file(p.file), p.file.offset, p.file.nbytes, to)
            for p, to in parts
            if p.file is not None
        ]
        return native.StagedBatch(self._ring, direct, from_files, own)

    def close(self) -> None:
        """Let the ring go, which ends its threads, when the last batch does."""
        del self._ring
        self._files.clear()

    def _file(self, file: FileRange) -> native.FileMapping:
        if file.path not in self._files:
            try:
                opened = native.FileMapping(file.path)
            except (native.FileAccessError, native.SizeError) as error:
                raise SourceError(f"{error}; load it again") from error
            if FileIdentity(*opened.identity) != file.identity:
                raise SourceError(
                    f"weight file has changed since it was mapped, it had {file.identity.nbytes} "
                    f"bytes and has {opened.nbytes}: {file.path}; load it again"
                )
            self._files[file.path] = opened
        return self._files[file.path]


def span(memory: Tensor) -> tuple[int, int]:
    """Address and size, as the native library takes them."""
    return memory.data_ptr(), memory.numel()

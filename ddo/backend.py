"""The device behind one protocol: the native allocator where it can be had, plain torch elsewhere.

Native knows bytes, addresses and streams; tensors begin here. Beside `ddo.native_pins`, the only
module that imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import native
from ddo.host_pins import HostPins
from ddo.native_pins import NativeRegistrar, NativeStager, span
from ddo.staging import HostPiece, InFlight, StagingSize
from ddo.torch_backend import DeviceError, TorchBackend
from ddo.transfer import Fence, HostCopy

_ADDRESS_SPACE_FACTOR = 4  # of the limit: addresses are free, and room keeps them unfragmented
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OpenedBackend:
    """A backend, and why it is not the native one if it is not."""

    backend: NativeBackend | TorchBackend
    fallback_reason: str | None


def open_backend(
    device: torch.device, *, limit_bytes: int, host_budget_bytes: int
) -> OpenedBackend:
    """The native backend of a CUDA device, or plain torch with the reason.

    Args:
        limit_bytes: Most device bytes for weights, ring and, inside `torch_memory`, torch's own
            segments together. Plain torch does not enforce it.
        host_budget_bytes: Most bytes of host memory to pin.

    Raises:
        DeviceError: The device is none that weights can be moved to.
    """
    try:
        backend = NativeBackend.on_cuda(
            device, limit_bytes=limit_bytes, host_budget_bytes=host_budget_bytes
        )
    except native.DriverUnavailableError as error:
        return OpenedBackend(TorchBackend(device, host_budget_bytes), str(error))
    return OpenedBackend(backend, None)


@dataclass(frozen=True, slots=True)
class _Prepared:
    batch: native.CopyBatch | native.StagedBatch
    sources: tuple[Tensor, ...]  # the batch borrows their memory
    target: Tensor


class NativeBackend:
    """A device whose weights live in a native arena. Implements `ddo.transfer.Backend`.

    Args:
        driver: The CUDA driver or, for tests on a CPU, a fake one; `name` tells which.
        device: What the tensors are on: `cpu` with a fake driver.
    """

    def __init__(
        self,
        driver: native.Driver,
        device: torch.device,
        *,
        limit_bytes: int,
        host_budget_bytes: int,
    ) -> None:
        self.name = "native-fake" if driver.is_fake else "native"
        self.device = device
        self.num_host_waits = 0
        self.native_device = native.Device(driver, device.index or 0)
        self.arena = native.Arena(
            self.native_device,
            limit_bytes=limit_bytes,
            reserve_bytes=limit_bytes * _ADDRESS_SPACE_FACTOR,
        )
        self._copy_stream = native.Stream(self.native_device)
        # On a CPU the caller computes in its own thread; this stream stands for that.
        self._host_stream = native.Stream(self.native_device) if driver.is_fake else None
        self.pins = HostPins(
            NativeRegistrar(self.native_device), host_budget_bytes, self._open_stager
        )
        self._in_flight = InFlight(
            self.pins.counters, (native.FileChangedError, native.FileAccessError)
        )

    @classmethod
    def on_cuda(
        cls, device: torch.device, *, limit_bytes: int, host_budget_bytes: int
    ) -> NativeBackend:
        """Open the CUDA driver.

        Raises:
            DeviceError: The device is no CUDA device, or not there.
            native.DriverUnavailableError: The driver lacks what the arena needs.
        """
        if device.type != "cuda":
            raise DeviceError(f"weights stream to cuda devices, not to {device}; take preset off")
        driver = native.open_driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(
            driver,
            torch.device("cuda", index),
            limit_bytes=limit_bytes,
            host_budget_bytes=host_budget_bytes,
        )

    def allocate(self, nbytes: int) -> Tensor:
        """Device memory below the limit, uint8 of shape `(nbytes,)`.

        It goes when its last view does and the work that was enqueued until then is over.
        """
        memory = self.arena.reserve(nbytes)
        try:
            memory.commit()
        except native.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error
        # The tensor may outlive this object: it keeps streams of ours, and torch's never end.
        compute = self._host_stream or self.stream()
        streams = [compute, self._copy_stream]
        found: Tensor = from_dlpack(memory.export(streams=streams))
        return found

    def prepare(self, copies: Sequence[HostCopy], target: Tensor) -> Any:
        parts: list[tuple[HostPiece, int]] = []
        for copy in copies:
            address = target.data_ptr() + copy.target_offset
            for piece in self.pins.pieces(copy.memory):
                parts.append((piece, address))
                address += piece.memory.numel()
        sources = tuple(piece.memory for piece, _ in parts)
        stager = self.pins.stager
        if isinstance(stager, NativeStager) and not all(piece.is_pinned for piece, _ in parts):
            return _Prepared(stager.batch(parts), sources, target)
        spans = [(*span(piece.memory), address) for piece, address in parts]
        return _Prepared(native.CopyBatch(self.native_device, spans), sources, target)

    def submit(self, prepared: Any, after: Sequence[Fence], ready: Fence) -> None:
        assert isinstance(prepared, _Prepared)
        self._in_flight.clear_way(prepared.target)
        transfer = prepared.batch.submit(
            self._copy_stream.handle, [_event(fence) for fence in after], _event(ready)
        )
        if transfer is not None:
            self._in_flight.add(ready, prepared.target, transfer, prepared)

    def fence(self, *, is_timed: bool = False) -> native.EventFence:
        return native.EventFence(self.native_device, has_timing=is_timed)

    def record(self, fence: Fence) -> None:
        _event(fence).record(self.stream())

    def wait(self, fence: Fence) -> None:
        self._in_flight.settle(fence)
        _event(fence).block_stream(self.stream())
        if self._host_stream is not None:
            # A CPU computes at once, so the host is what has to wait.
            self._host_stream.synchronize()

    def elapsed_s(self, begin: Fence, end: Fence) -> float | None:
        return _event(end).elapsed_ms_since(_event(begin)) / 1e3

    def synchronize(self, fence: Fence) -> None:
        self.num_host_waits += 1
        try:
            self._in_flight.settle(fence)
        finally:
            _event(fence).synchronize()

    def stream(self) -> int:
        if self._host_stream is not None:
            return self._host_stream.handle
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def pin(self, memories: Sequence[Tensor], *, keep: Sequence[Tensor] = ()) -> None:
        self.pins.pin(memories, keep=keep)

    def close(self) -> None:
        """Unpin the host's memory. Device memory goes with the last tensor that views it."""
        self._in_flight.close()
        self.pins.close()
        self.arena.collect()

    def _open_stager(self, size: StagingSize) -> NativeStager | None:
        try:
            return NativeStager(self.native_device, size)
        except (native.CudaError, native.OutOfMemoryError):
            return None

    def free_bytes(self) -> int:
        """Bytes that `allocate` can still back: below the limit, and free on the device."""
        stats = self.arena.stats()
        free, _ = self.native_device.memory_info()
        return min(stats.limit_bytes - stats.used_bytes, free)

    def untouched_bytes(self) -> int:
        """As `free_bytes`: blocks that torch keeps are below the limit, or not free."""
        return self.free_bytes()

    def measure_link(self) -> float:
        """Bytes per second from pinned memory to the device: the best of three copies.

        Blocks the host for a few copies of 64 MiB. A fake device answers in made-up time.
        """
        host = torch.zeros(_PROBE_BYTES + self._page, dtype=torch.uint8)
        skipped = -host.data_ptr() % self._page
        host = host[skipped : skipped + _PROBE_BYTES]
        pages = native.HostPages(
            self.native_device, host.data_ptr(), _PROBE_BYTES, is_read_only=False
        )
        target = self.allocate(_PROBE_BYTES)
        batch = native.CopyBatch(
            self.native_device, [(host.data_ptr(), _PROBE_BYTES, target.data_ptr())]
        )
        best = 0.0
        for _ in range(4):
            begin, end = self.fence(is_timed=True), self.fence(is_timed=True)
            begin.record(self._copy_stream.handle)
            batch.submit(self._copy_stream.handle, [begin], end)
            end.synchronize()
            best = max(best, _PROBE_BYTES / (end.elapsed_ms_since(begin) / 1e3))
        del pages
        return best

    _page = 4096


@contextmanager
def torch_memory(backend: NativeBackend) -> Iterator[None]:
    """Let this thread's torch allocate from the backend's arena, under its limit.

    When torch asks for more than is left, ranges with a demotion order give way after their
    fences; else torch raises its own OutOfMemoryError and everything stays usable. Tensors made
    inside may live on outside. Does nothing on a CPU. The scope is the calling thread's.

    Raises:
        native.StateError: Another scope is open on the device.
    """
    if backend.device.type != "cuda":
        yield
        return
    route = native.TorchRoute(backend.arena)
    try:
        pool = torch.cuda.MemPool(_torch_allocator())
        with torch.cuda.use_mem_pool(pool, backend.device):
            yield
        del pool  # gives cached segments back; those in use follow with their tensors
    finally:
        route.close()


@functools.cache
def _torch_allocator() -> Any:
    """Made once and kept: torch frees through it for as long as the process lives."""
    allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(
        native.library_path, "exeunt_torch_malloc", "exeunt_torch_free"
    )
    return allocator.allocator()


def _event(fence: Fence) -> native.EventFence:
    assert isinstance(fence, native.EventFence)
    return fence

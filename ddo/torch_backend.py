"""The device as torch alone reaches it: one stream for copies, torch's events and allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddo.errors import DdoError
from ddo.host_pins import HostPins
from ddo.readers import ReaderThreads, StagedPart
from ddo.registrars import DriverRegistrar, Registrar
from ddo.staging import InFlight, StagingSize
from ddo.transfer import Fence, HostCopy

_PROBE_BYTES = 64 << 20


class DeviceError(DdoError, RuntimeError):
    """The device is missing or of a kind that weights cannot be moved to."""


class CudaFence:
    """A CUDA event."""

    __slots__ = ("event",)

    def __init__(self, *, is_timed: bool) -> None:
        self.event: torch.cuda.Event = torch.cuda.Event(  # type: ignore[no-untyped-call]
            enable_timing=is_timed
        )

    def is_complete(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Prepared:
    pairs: list[tuple[Tensor, Tensor]]
    staged: list[StagedPart]
    target: Tensor


class _Copies:
    """The copy stream as reader threads use it. Implements `ddo.readers.CopyQueue`."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream

    def fence(self) -> CudaFence:
        return CudaFence(is_timed=False)

    def enqueue(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self, fence: Fence) -> None:
        _event(fence).record(self._stream)

    def wait(self, fence: Fence) -> None:
        _event(fence).synchronize()


class TorchBackend:
    """A CUDA device. Implements `ddo.transfer.Backend`.

    Args:
        device: Such as `cuda:0`.
        host_budget_bytes: Most bytes of host memory to pin.
        registrar: What makes host pages known to the device; the driver by default.
    """

    name = "torch"

    def __init__(
        self, device: torch.device, host_budget_bytes: int, registrar: Registrar | None = None
    ) -> None:
        if device.type != "cuda":
            raise DeviceError(f"weights stream to cuda devices, not to {device}; take preset off")
        if not torch.cuda.is_available():
            raise DeviceError(f"no CUDA device is usable, {device} was asked for; use device cpu")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"{device} was asked for, there are {torch.cuda.device_count()} CUDA devices"
            )
        self.device = torch.device("cuda", index)
        self.num_host_waits = 0
        with torch.cuda.device(self.device):
            torch.empty(1, device=self.device)  # makes the device's context current
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._registrar = registrar or DriverRegistrar()
        self.pins = HostPins(self._registrar, host_budget_bytes, self._open_stager)
        self._in_flight = InFlight(self.pins.counters)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def prepare(self, copies: Sequence[HostCopy], target: Tensor) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []
        staged: list[StagedPart] = []
        for copy in copies:
            begin = copy.target_offset
            for piece in self.pins.pieces(copy.memory):
                part = target[begin : begin + piece.memory.numel()]
                if piece.is_pinned or self.pins.stager is None:
                    pairs.append((part, piece.memory))
                else:
                    staged.append(StagedPart(piece.memory, piece.file, part))
                begin += piece.memory.numel()
        return _Prepared(pairs, staged, target)

    def submit(self, prepared: Any, after: Sequence[Fence], ready: Fence) -> None:
        assert isinstance(prepared, _Prepared)
        self._in_flight.clear_way(prepared.target)
        stream = self._copy_stream
        for fence in after:
            stream.wait_event(_event(fence))
        with torch.cuda.stream(stream):
            for target, source in prepared.pairs:
                target.copy_(source, non_blocking=True)
        if not prepared.staged:
            _event(ready).record(stream)
            return
        assert isinstance(self.pins.stager, ReaderThreads)
        transfer = self.pins.stager.start(prepared.staged, ready)
        self._in_flight.add(ready, prepared.target, transfer, prepared)

    def fence(self, *, is_timed: bool = False) -> CudaFence:
        return CudaFence(is_timed=is_timed)

    def record(self, fence: Fence) -> None:
        _event(fence).record(torch.cuda.current_stream(self.device))

    def wait(self, fence: Fence) -> None:
        self._in_flight.settle(fence)
        torch.cuda.current_stream(self.device).wait_event(_event(fence))

    def elapsed_s(self, begin: Fence, end: Fence) -> float | None:
        return float(_event(begin).elapsed_time(_event(end))) / 1e3

    def synchronize(self, fence: Fence) -> None:
        self.num_host_waits += 1
        try:
            self._in_flight.settle(fence)
        finally:
            _event(fence).synchronize()

    def stream(self) -> Hashable:
        return torch.cuda.current_stream(self.device).cuda_stream

    def pin(self, memories: Sequence[Tensor], *, keep: Sequence[Tensor] = ()) -> None:
        with self._context():
            self.pins.pin(memories, keep=keep)

    def close(self) -> None:
        self._in_flight.close()
        with self._context():
            self.pins.close()

    def _open_stager(self, size: StagingSize) -> ReaderThreads | None:
        try:
            return ReaderThreads(_Copies(self.device, self._copy_stream), self._registrar, size)
        except OSError:
            return None

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The driver's own functions need the device's context in the calling thread."""
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info(self.device)  # the runtime makes it current
            yield

    def free_bytes(self) -> int:
        """Device memory that torch can still get, and what it holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + held

    def untouched_bytes(self) -> int:
        """Device memory that torch has not asked the driver for, nor anybody else."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def measure_link(self) -> float:
        """Bytes per second from pinned memory to the device: the best of three copies.

        Blocks the host for a few copies of 64 MiB.
        """
        host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        target = self.allocate(_PROBE_BYTES)
        best = 0.0
        for _ in range(4):
            begin, end = self.fence(is_timed=True), self.fence(is_timed=True)
            self.record(begin)
            target.copy_(host, non_blocking=True)
            self.record(end)
            self.synchronize(end)
            elapsed_s = self.elapsed_s(begin, end)
            if elapsed_s:
                best = max(best, _PROBE_BYTES / elapsed_s)
        del target, host
        return best


def _event(fence: Fence) -> torch.cuda.Event:
    assert isinstance(fence, CudaFence)
    return fence.event

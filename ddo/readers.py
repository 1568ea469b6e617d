"""Reader threads in Python, for devices that the native library does not serve."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddo.registrars import Registrar
from ddo.source import FileRange
from ddo.staging import StagingSize
from ddo.transfer import Fence
from ddo.weight_files import FileIdentity, SourceError


class CopyQueue(Protocol):
    """The device's stream of copies, used by several threads."""

    def fence(self) -> Fence:
        """A fence that was never recorded."""
        ...

    def enqueue(self, source: Tensor, target: Tensor) -> None:
        """Copy from pinned memory, behind everything that was enqueued."""
        ...

    def record(self, fence: Fence) -> None:
        """Record behind everything that was enqueued."""
        ...

    def wait(self, fence: Fence) -> None:
        """Block the host until the fence is complete."""
        ...


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Bytes to stage.

    Attributes:
        memory: Where they lie in pageable memory.
        file: Where they are read instead, if a file has them.
        target: Where they go, uint8 of the same shape.
    """

    memory: Tensor
    file: FileRange | None
    target: Tensor


class ReaderTransfer:
    """Parts on their way. Implements `ddo.staging.Transfer`."""

    def __init__(self, copies: CopyQueue, ready: Fence, num_chunks: int) -> None:
        self._copies = copies
        self._ready = ready
        self._lock = threading.Lock()
        self._num_left = num_chunks
        self._failure: Exception | None = None
        self._is_over = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        if not self._is_over.wait(timeout_s):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def end_chunk(self, failure: Exception | None) -> None:
        """One chunk is enqueued or has failed; after the last one the fence is recorded."""
        with self._lock:
            self._failure = self._failure or failure
            self._num_left -= 1
            if self._num_left:
                return
            try:
                self._copies.record(self._ready)
            except Exception as error:
                self._failure = self._failure or error
        self._is_over.set()


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    drained: Fence


@dataclass(frozen=True, slots=True)
class _Chunk:
    transfer: ReaderTransfer
    part: StagedPart
    begin: int
    nbytes: int


class ReaderThreads:
    """Pinned buffers and the threads that fill them. Implements `ddo.staging.Stager`.

    Raises:
        OSError: The device refuses to register the buffers.
    """

    def __init__(self, copies: CopyQueue, registrar: Registrar, size: StagingSize) -> None:
        self._copies = copies
        self._registrar = registrar
        self._buffer_bytes = size.buffer_bytes
        self._memory = torch.frombuffer(mmap.mmap(-1, size.nbytes), dtype=torch.uint8)
        status = registrar.register(self._memory.data_ptr(), size.nbytes, is_read_only=False)
        if status:
            raise OSError(f"the device refuses {size.nbytes} pinned bytes: status {status}")
        self._files = _Files()
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for begin in range(0, size.nbytes, size.buffer_bytes):
            memory = self._memory[begin : begin + size.buffer_bytes]
            self._free.put(_Buffer(memory, copies.fence()))
        self._threads = [
            threading.Thread(target=self._run, name=f"ddo-reader-{k}", daemon=True)
            for k in range(size.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, parts: Sequence[StagedPart], ready: Fence) -> ReaderTransfer:
        """Begin to stage parts; `ready` is recorded behind their copies. Does not wait."""
        pieces = [(part, *span) for part in parts for span in self._split(part.memory.numel())]
        transfer = ReaderTransfer(self._copies, ready, len(pieces))
        for part, begin, nbytes in pieces:
            self._chunks.put(_Chunk(transfer, part, begin, nbytes))
        return transfer

    def close(self) -> None:
        """Finish what was started, end the threads and give the buffers back."""
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads:
            while not self._free.empty():
                self._copies.wait(self._free.get().drained)
            self._registrar.unregister(self._memory.data_ptr())
        self._threads = []
        self._files.close()

    def _split(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for begin in range(0, nbytes, self._buffer_bytes):
            yield begin, min(self._buffer_bytes, nbytes - begin)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            buffer = self._free.get()
            failure: Exception | None = None
            try:
                self._move(chunk, buffer)
            except Exception as error:
                # Its frames hold device memory, and whoever waits will have frames of his own.
                failure = error.with_traceback(None)
            self._free.put(buffer)
            chunk.transfer.end_chunk(failure)

    def _move(self, chunk: _Chunk, buffer: _Buffer) -> None:
        # The copy out of this buffer may still read it; overwriting it would corrupt that weight.
        self._copies.wait(buffer.drained)
        part, filled = chunk.part, buffer.memory[: chunk.nbytes]
        if part.file is not None:
            self._files.read(part.file, chunk.begin, filled)
        else:
            filled.copy_(part.memory[chunk.begin : chunk.begin + chunk.nbytes])
        self._copies.enqueue(filled, part.target[chunk.begin : chunk.begin + chunk.nbytes])
        self._copies.record(buffer.drained)


class _Files:
    """Weight files that threads read, opened once each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def read(self, file: FileRange, begin: int, filled: Tensor) -> None:
        """Fill a buffer from byte `begin` of a range.

        Raises:
            SourceError: The file has changed, is shorter or cannot be read.
        """
        offset, left = file.offset + begin, filled.numpy().data
        handle = self._handle(file)
        while left:
            try:
                count = os.preadv(handle, [left], offset)
            except OSError as error:
                raise SourceError(
                    f"weight file cannot be read at byte {offset}: {file.path}: {error.strerror}"
                ) from error
            if not count:
                raise SourceError(
                    f"weight file ends at byte {offset}, {len(left)} bytes too early, it had "
                    f"{file.identity.nbytes} bytes: {file.path}; load it again"
                )
            offset, left = offset + count, left[count:]
        self._check(handle, file, file.offset + begin)

    def close(self) -> None:
        """Close all."""
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def _handle(self, file: FileRange) -> int:
        with self._lock:
            if file.path not in self._open:
                try:
                    self._open[file.path] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise SourceError(
                        f"weight file cannot be opened for byte {file.offset}: {file.path}: "
                        f"{error.strerror}"
                    ) from error
            return self._open[file.path]

    def _check(self, handle: int, file: FileRange, offset: int) -> None:
        """Refuse what was read if the file is another one by now."""
        now = FileIdentity.of(handle)
        if now != file.identity:
            raise SourceError(
                f"weight file changed before byte {offset} of it was read, it had "
                f"{file.identity.nbytes} bytes and has {now.nbytes}: {file.path}; load it again"
            )

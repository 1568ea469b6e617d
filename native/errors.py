"""What the native library raises. Attributes carry the numbers, so no caller parses a message."""


class NativeError(Exception):
    """Root of all errors of this package."""


class DriverUnavailableError(NativeError, RuntimeError):
    """There is no CUDA driver, or the device lacks what the allocator needs."""


class CudaError(NativeError, RuntimeError):
    """A driver call failed; the objects it was about are as they were."""

    def __init__(self, message: str, *, status: int, status_name: str, call: str) -> None:
        super().__init__(message)
        self.status = status
        self.status_name = status_name
        self.call = call


class OutOfMemoryError(NativeError, MemoryError):
    """Neither the limit nor, after giving back what could be, the device has the bytes left."""

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int,
        free_bytes: int,
        limit_bytes: int,
        largest_bytes: int,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.limit_bytes = limit_bytes
        self.largest_bytes = largest_bytes


class SizeError(NativeError, ValueError):
    """A size, offset or alignment can't be served, whatever the state is."""


class StateError(NativeError, RuntimeError):
    """The object is closed, retired, stale, or was never acquired."""


class BusyError(NativeError, RuntimeError):
    """A live view, an acquired object or pending work forbids the call."""


class ForkedError(NativeError, RuntimeError):
    """The process was forked after its parent had opened the device."""


class FileChangedError(NativeError, RuntimeError):
    """A weight file is no longer the one that was opened."""


class FileAccessError(NativeError, OSError):
    """The operating system refused a weight file; `errno` says why."""

    def __init__(self, message: str, *, errno: int) -> None:
        super().__init__(message)
        self.errno = errno

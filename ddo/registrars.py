"""Ways to make host pages known to a device, so that it reads them by itself.

Registration goes through the driver's own library: an error of the runtime's function would
stay behind and be raised by an innocent later call.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

from ddo.process_maps import MAPS, mapped_spans

NOT_SUPPORTED = 801
"""The driver's status for what it cannot do: the next tier serves the bytes."""

_READ_ONLY = 0x08


class Registrar(Protocol):
    """Makes host pages known to a device. Both return the driver's status, 0 for success."""

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> int: ...

    def unregister(self, address: int) -> int: ...


class DriverRegistrar:
    """The driver's own functions; the calling thread has a context of the device.

    Args:
        library: In place of the driver's.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def register(self, address: int, nbytes: int, *, is_read_only: bool) -> int:
        """Pin whole pages; `NOT_SUPPORTED`, without asking the driver, for a private file's.

        The kernel would copy each of those pages at best. Registered read-only, they were seen
        never to return from the driver.
        """
        if touches_private_file(address, nbytes):
            return NOT_SUPPORTED
        flags = _READ_ONLY if is_read_only else 0
        return int(
            self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)
            )
        )

    def unregister(self, address: int) -> int:
        """Let pinned pages go."""
        return int(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))


def touches_private_file(address: int, nbytes: int, maps: Path = MAPS) -> bool:
    """Whether any of these pages is of a file that is mapped `MAP_PRIVATE`."""
    return any(
        span.is_private and span.inode
        for span in mapped_spans(maps)
        if span.begin < address + nbytes and address < span.end
    )

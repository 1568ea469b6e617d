"""Whether CUDA was initialised in this process, asked without initialising it."""

from __future__ import annotations

import ctypes
from pathlib import Path

LIBRARY = "libcuda.so.1"
NOT_INITIALISED = 3
"""The driver's answer to every call that comes before the one that initialises it."""


def is_cuda_initialised() -> bool:
    """Whether some library of this process has initialised the CUDA driver.

    A fork of such a process can never use the device.
    """
    if not _is_driver_loaded():
        return False
    count = ctypes.c_int()
    status = ctypes.CDLL(LIBRARY).cuDeviceGetCount(ctypes.byref(count))
    return int(status) != NOT_INITIALISED


def _is_driver_loaded() -> bool:
    return "libcuda.so" in Path("/proc/self/maps").read_text()

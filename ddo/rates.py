"""How fast a device is: its link from host memory, pinned and not, and its matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddo.attaching import open_device
from ddo.settings import OffloadSettings

_PROBE_BYTES = 64 << 20
_NUM_TRIES = 3
_MATRIX_EDGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The best of several tries each.

    Attributes:
        pinned_bytes_per_s: Copies from pinned host memory.
        pageable_bytes_per_s: Copies from pageable host memory, which the driver copies first.
        flops_per_s: Products of bfloat16 matrices, 4096 to an edge.
        fallback_reason: Why plain torch measured in place of the native library, if it did.
    """

    pinned_bytes_per_s: float
    pageable_bytes_per_s: float
    flops_per_s: float
    fallback_reason: str | None


def measure_rates(device: str | torch.device) -> DeviceRates:
    """Measure a CUDA device. Takes about a second and half a GiB of it.

    Raises:
        DeviceError: It is no CUDA device, or none is usable.
        torch.OutOfMemoryError: Somebody else holds its memory.
    """
    settings = OffloadSettings(preset="stream", device_budget="1GiB", host_budget="256MiB")
    opened = open_device(device, settings)
    place = opened.backend.device
    try:
        pinned = opened.backend.measure_link()
    finally:
        opened.backend.close()
    host = torch.ones(_PROBE_BYTES, dtype=torch.uint8)  # written, so that it has pages
    target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=place)
    pageable_s = best_s(lambda: target.copy_(host), place)
    edge = _MATRIX_EDGE
    matrix = torch.randn(edge, edge, device=place, dtype=torch.bfloat16)
    product_s = best_s(lambda: torch.mm(matrix, matrix), place)
    return DeviceRates(
        pinned_bytes_per_s=pinned,
        pageable_bytes_per_s=_PROBE_BYTES / pageable_s,
        flops_per_s=2.0 * edge**3 / product_s,
        fallback_reason=opened.fallback_reason,
    )


def best_s(work: Callable[[], object], place: torch.device) -> float:
    """Seconds of the quickest of three runs, each waited for; one before them is not timed."""
    times = []
    for _ in range(1 + _NUM_TRIES):
        _wait(place)
        start = time.perf_counter()
        work()
        _wait(place)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)

"""`RunTracker`: what one request of one stage cost, as data beside its result.

Times are host wall-clock seconds, memory is bytes. Nothing here enters a digest.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from typing import Any

from stages.contracts import StageContext, StageRequest
from stages.memory_samples import MemorySamples, host_bytes
from stages.stage_report import SCHEMA

LIBRARIES = ("exeunt", "torch", "diffusers", "transformers", "safetensors")


class RunTracker:
    """Collects host phases, steps, warnings and memory of one request."""

    def __init__(self, request: StageRequest, context: StageContext) -> None:
        self._request, self._context = request, context
        self._started = time.perf_counter()
        self._started_at = time.time()
        self._host_phases: list[dict[str, Any]] = []
        self._step_ends: list[float] = []
        self._num_steps = 0
        self.warnings: list[str] = []
        self.facts: dict[str, Any] = {}
        if self._on_cuda():
            self._cuda().reset_peak_memory_stats(context.device)
        self._samples = MemorySamples(self._device_used_bytes if self._on_cuda() else None)

    @contextmanager
    def host_phase(self, name: str) -> Iterator[None]:
        """Time a part of the request, such as `load` or `run`; kept also when it fails."""
        start = time.perf_counter()
        try:
            with self._samples.taken():
                yield
        finally:
            self._host_phases.append(
                {
                    "name": name,
                    "start_s": round(start - self._started, 6),
                    "elapsed_s": round(time.perf_counter() - start, 6),
                }
            )

    def step(self, num_steps: int) -> None:
        """Note the end of a step of the denoising loop, as the host saw it."""
        self._step_ends.append(time.perf_counter())
        self._num_steps = num_steps

    def report(self) -> dict[str, Any]:
        """The report as plain JSON values; `stages.stage_report.StageReport` describes them."""
        return {
            "schema": SCHEMA,
            "stage": self._request.stage,
            "label": self._request.label,
            "request_digest": self._request.digest,
            "run_id": self._context.run_id,
            "host": platform.node(),
            "pid": os.getpid(),
            "device": self._context.device,
            "device_name": self._device_name(),
            "dtype": self._request.dtype,
            "started_at": self._started_at,
            "elapsed_s": round(time.perf_counter() - self._started, 6),
            "host_phases": self._host_phases,
            "steps": self._steps(),
            "memory": {**host_memory(), **self._device_memory()},
            "memory_samples": self._samples.columns(),
            "versions": library_versions(),
            "warnings": self.warnings,
            "fallbacks": list(self._context.fallbacks),
            **self.facts,
        }

    def _steps(self) -> dict[str, Any]:
        gaps = [b - a for a, b in zip(self._step_ends, self._step_ends[1:], strict=False)]
        return {
            "num_steps": self._num_steps,
            "num_run": len(self._step_ends),
            "median_s": round(statistics.median(gaps), 6) if gaps else None,
        }

    def _on_cuda(self) -> bool:
        if not self._context.device.startswith("cuda") or "torch" not in sys.modules:
            return False
        return bool(self._cuda().is_available())

    @staticmethod
    def _cuda() -> Any:
        import torch

        return torch.cuda

    def _device_name(self) -> str:
        if self._on_cuda():
            return str(self._cuda().get_device_name(self._context.device))
        return platform.processor() or platform.machine()

    def _device_used_bytes(self) -> int:
        free, total = self._cuda().mem_get_info(self._context.device)
        return int(total - free)

    def _device_memory(self) -> dict[str, int]:
        if not self._on_cuda():
            return {}
        cuda, device = self._cuda(), self._context.device
        return {
            "device_peak_allocated_bytes": cuda.max_memory_allocated(device),
            "device_peak_reserved_bytes": cuda.max_memory_reserved(device),
        }


def host_memory() -> dict[str, int]:
    """This process's resident memory by kind, and its peak, in bytes (Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_rss_bytes": peak, **host_bytes()}


def library_versions() -> dict[str, str]:
    """Installed versions of what a result depends on, plus Python's."""
    return dict(_library_versions())


@lru_cache(maxsize=1)
def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions

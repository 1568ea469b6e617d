"""One row of `tests.benchmarks.offload_bench`: load, attach and step, in this process."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import offloaders
from tests.benchmarks.offload_shapes import SHAPES

GIB = 1 << 30


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, attach, step; in this process."""
    name, tokens, steps = options.one, options.tokens[0], options.steps
    cap = options.caps[0] or None
    shape = SHAPES[options.shape]
    offloaders.prepare_process(name)
    model_class = shape.load_class()
    torch.zeros(1, device="cuda")
    offload = offloaders.offloader(name, options.host_gib[0])
    with Peaks() as peaks:
        start = time.perf_counter()
        module = offload(options.weights, model_class, cap or 0.0)
        torch.cuda.synchronize()
        setup_s = time.perf_counter() - start
        inputs = shape.step_inputs(options.weights, tokens, "cuda")
        times = []
        with torch.no_grad():
            for k in range(steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                inputs["timestep"] = torch.full_like(inputs["timestep"], 1 - k / steps)
                noise = module(**inputs)[0]
                inputs[shape.latents] = inputs[shape.latents] - noise / steps
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
    latents = inputs[shape.latents]
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "shape": options.shape,
        "offloader": name,
        "cap_gib": cap,
        "tokens": tokens,
        "steps": steps,
        "setup_s": round(setup_s, 2),
        "first_step_s": round(times[0], 3),
        "step_s": round(statistics.median(times[3:] or times), 4),
        "denoise_s": round(sum(times), 2),
        "device_gib": round(peaks.device_bytes / GIB, 2),
        "anonymous_gib": round(peaks.anonymous_bytes / GIB, 2),
        "is_finite": bool(torch.isfinite(latents).all()),
    }
    kept = options.weights / f"latents-{tokens}-{steps}.pt"
    if name == "resident":
        torch.save(latents.cpu(), kept)
        row["link_bytes_per_s"] = link_bytes_per_s()
    elif kept.exists():
        row["is_bit_equal"] = torch.equal(torch.load(kept), latents.cpu())
    if offloaders.sessions:
        row |= _own_facts(offloaders.sessions[-1].report().to_json())
    if options.host_gib[0] is not None:
        row["host_gib"] = options.host_gib[0]
    return row


def _own_facts(report: dict[str, Any]) -> dict[str, Any]:
    """What our session's report adds to a row."""
    plan = report["plan"]
    return {
        "streamed_bytes": plan["streamed_bytes"],
        "ring_bytes": plan["ring_bytes"],
        "predicted_step_s": report["predicted_step_s"],
        "num_replans": report["num_replans"],
        "num_repeated": report["num_repeated"],
        "pins": report["pins"],
        "setup_by_phase_s": {k: round(v, 3) for k, v in report["setup_s"].items()},
    }


def link_bytes_per_s() -> float:
    """The median rate of ten pinned copies of 256 MiB."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return host.numel() / statistics.median(times[3:])


class Peaks:
    """Polls the device memory taken since the start, and this process's anonymous memory."""

    def __init__(self) -> None:
        self.device_bytes = self.anonymous_bytes = 0
        self._is_running = True
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Peaks:
        self._free_before = torch.cuda.mem_get_info()[0]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_running = False
        self._thread.join()

    def _poll(self) -> None:
        while self._is_running:
            taken = self._free_before - torch.cuda.mem_get_info()[0]
            self.device_bytes = max(self.device_bytes, taken)
            status = Path("/proc/self/status").read_text()
            kib = int(status.split("RssAnon:")[1].split()[0])
            self.anonymous_bytes = max(self.anonymous_bytes, kib * 1024)
            time.sleep(0.01)

"""Offloaders of this package for a side-by-side benchmark: a directory and a cap in, a module out.

`module:function` names such as `tests.benchmarks.ddo_peer:stream` are called with the folder of
a diffusion transformer's weights and the GiB of device memory that it may use. What comes back
is ready for CUDA inputs.

From a shell, the same with a short run of its own, which prints one JSON document with the
session's report in it:

    python -m tests.benchmarks.ddo_peer stream WEIGHTS_DIR CAP_GIB [--tokens 4096] [--steps 12]

With `--host-budget 2GiB` only so much host memory may be pinned; a run for each of several
budgets shows how time grows with what is not pinned.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

import ddo

_RESERVE = "1.5GiB"  # for activations and workspaces of a 4096-token step
_sessions: list[Any] = []  # a session ends with its process
_pinning: dict[str, str] = {}  # settings of host memory, from the command line


def stream(weights_dir: str, cap_gib: float) -> nn.Module:
    """The default: native allocator, residents and ring planned together."""
    return _attached(weights_dir, cap_gib, preset="stream")


def stream_torch(weights_dir: str, cap_gib: float) -> nn.Module:
    """The same over torch's own allocator, streams and events."""
    return _attached(weights_dir, cap_gib, preset="stream", is_native=False)


def low_memory(weights_dir: str, cap_gib: float) -> nn.Module:
    """Everything streams through the smallest ring."""
    return _attached(weights_dir, cap_gib, preset="low_memory")


def auto(weights_dir: str, cap_gib: float) -> nn.Module:
    """What a user gets who says nothing."""
    return _attached(weights_dir, cap_gib, preset="auto")


def _attached(
    weights_dir: str, cap_gib: float, *, preset: Any, is_native: bool = True
) -> nn.Module:
    import torch

    settings = ddo.OffloadSettings(
        preset=preset,
        device_budget=f"{cap_gib:g}GiB",
        reserve=_RESERVE,
        **_pinning,
    )
    options: dict[str, Any] = {}
    if not is_native:
        from ddo.host_memory import read_host_memory
        from ddo.torch_backend import TorchBackend

        pinned = settings.host_budget_bytes
        if pinned is None:
            pinned = int(read_host_memory().available_bytes * 0.6)
        options["backend"] = TorchBackend(torch.device("cuda"), pinned)
    session = ddo.load(_model_class(weights_dir), weights_dir, settings, device="cuda", **options)
    _sessions.append(session)
    return session.module


def _model_class(weights_dir: str) -> Any:
    """The class that the configuration names."""
    name = json.loads((Path(weights_dir) / "config.json").read_text())["_class_name"]
    return getattr(importlib.import_module("diffusers"), name)


def main() -> None:
    """Run one offloader and print times, memory and its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("offloader", choices=["stream", "stream_torch", "low_memory", "auto"])
    parser.add_argument("weights_dir")
    parser.add_argument("cap_gib", type=float)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--host-budget", help="host memory that may be pinned, such as 2GiB")
    options = parser.parse_args()
    if options.host_budget is not None:
        _pinning["host_budget"] = options.host_budget
    import torch

    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    module = globals()[options.offloader](options.weights_dir, options.cap_gib)
    torch.cuda.synchronize()
    setup_s = time.perf_counter() - start
    inputs = flux_inputs(options.tokens)
    times = []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            output = module(**inputs)[0]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    document = {
        "offloader": options.offloader,
        "cap_gib": options.cap_gib,
        "host_budget": options.host_budget,
        "tokens": options.tokens,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "setup_s": setup_s,
        "first_step_s": times[0],
        "step_s": statistics.median(times[3:] or times),
        "finite": bool(torch.isfinite(output).all()),
        "report": _sessions[-1].report().to_json(),
    }
    json.dump(document, sys.stdout, indent=1)


def flux_inputs(tokens: int) -> dict[str, Any]:
    """Seeded inputs of a FLUX transformer for a square picture of `tokens` patches."""
    import torch

    side = int(tokens**0.5)
    generator = torch.Generator("cuda").manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    ids = torch.zeros(side * side, 3, device="cuda")
    ids[:, 1] = torch.arange(side, device="cuda").repeat_interleave(side)
    ids[:, 2] = torch.arange(side, device="cuda").repeat(side)
    return {
        "hidden_states": noise(1, side * side, 64),
        "encoder_hidden_states": noise(1, 512, 4096),
        "pooled_projections": noise(1, 768),
        "timestep": torch.ones(1, device="cuda", dtype=torch.bfloat16),
        "img_ids": ids,
        "txt_ids": torch.zeros(512, 3, device="cuda"),
        "return_dict": False,
    }


if __name__ == "__main__":
    main()

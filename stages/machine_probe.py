"""The part of `exeunt doctor` that loads torch and the driver, in a process of its own.

usage: python -m stages.machine_probe DEVICE

Prints one JSON document: `memory`, `driver`, `torch`, `gpu`, `native`, `rates`, and `problems`:
sentences about what is there and does not work.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def probe(device: str) -> dict[str, Any]:
    """Look at host memory and, if `device` is a CUDA device, at that device.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
    """
    from ddo.host_memory import read_host_memory
    from ddo.native_facts import native_facts

    if device != "cpu":
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        import torch  # before the driver is opened: torch 2.11 crashes while it is imported after

    _, _, ordinal = device.partition(":")
    facts = native_facts(int(ordinal or 0))
    found: dict[str, Any] = {
        "memory": asdict(read_host_memory()),
        "driver": driver_version(),
        "native": {"is_available": facts.is_available, "reason": facts.reason},
        "torch": None,
        "gpu": None,
        "rates": None,
        "problems": [],
    }
    if device == "cpu":
        return found

    found["torch"] = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        from stages.devices import why_no_cuda

        found["problems"].append(why_no_cuda(facts.reason))
        return found
    found["gpu"] = _gpu(torch, device) | {
        name: value
        for name, value in asdict(facts).items()
        if name in ("granularity_bytes", "has_read_only_registration")
    }
    from ddo.rates import measure_rates

    try:
        found["rates"] = asdict(measure_rates(device))
    except Exception as error:  # whatever a driver raises: the report goes on without rates
        found["problems"].append(f"{device} cannot be measured: {type(error).__name__}: {error}")
    return found


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the NVIDIA kernel module; None where none is loaded."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*\b", path.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _gpu(torch: Any, device: str) -> dict[str, Any]:
    with torch.cuda.device(device):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "free_bytes": free,
        "total_bytes": total,
        "num_devices": torch.cuda.device_count(),
    }


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))

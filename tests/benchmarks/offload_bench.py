"""Offloaders side by side: one model, one cap on free device memory, a process for each.

usage: python -m tests.benchmarks.offload_bench --weights DIR [--shape flux] [--caps 16 12 8]
           [--tokens 4096 1024] [--steps 28] [--offloaders stream group] [--rows FILE]

A ballast process takes the rest of the device's memory with plain allocations, so that an
offloader that overruns its budget fails as it would on a small card. Each row is a JSON object,
printed and appended to the rows file; the resident model's row comes first, for each number of
tokens. `bound_s` is `max(C, S / B)`: C the resident step, S the bytes that the offloader copies
in a step, B the rate of pinned copies of 256 MiB, all of this run. Times:

- `setup_s`: load and attach, without imports;
- `first_step_s`, `step_s` (the median from the fourth step on), `denoise_s` (all steps).

Memory is the device's (without the process's context), and this process's anonymous pages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.offload_shapes import SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30
_TIMEOUT_S = 240


def main() -> None:
    """Measure every row, or be one of the processes that do."""
    options = _arguments()
    if options.ballast is not None:
        hold_ballast(options.ballast)
    elif options.one is not None:
        from tests.benchmarks.offload_row import measure

        print(json.dumps(measure(options)), flush=True)
        os._exit(0)  # no peer's exit handlers: the next row waits for the memory
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """All rows, the resident model first."""
    SHAPES[options.shape].make(options.weights, "cuda")
    reference = {tokens: _row(options, "resident", None, tokens, None) for tokens in options.tokens}
    for cap in options.caps:
        with ballast(cap):
            for name in options.offloaders:
                if name == "resident" or not _is_installed(name):
                    continue
                for tokens in options.tokens:
                    for host in options.host_gib if name in ("stream", "low_memory") else [None]:
                        _row(options, name, cap, tokens, host, reference[tokens])


def _row(
    options: argparse.Namespace,
    name: str,
    cap: float | None,
    tokens: int,
    host: float | None,
    reference: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure one row in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.offload_bench", "--one", name]
    command += ["--weights", str(options.weights), "--shape", options.shape]
    command += ["--caps", str(cap or 0), "--tokens", str(tokens), "--steps", str(options.steps)]
    if host is not None:
        command += ["--host-gib", str(host)]
    failed: dict[str, Any] = {"offloader": name, "cap_gib": cap, "tokens": tokens}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        row = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        row = failed | {"error": f"not done after {_TIMEOUT_S} s"}
    except (IndexError, ValueError):
        row = failed | {"error": done.stderr[-400:]}
    if reference is not None and "step_s" in row and "step_s" in reference:
        row["resident_step_s"] = reference["step_s"]
        row["step_by_resident"] = round(row["step_s"] / reference["step_s"], 4)
        if row.get("streamed_bytes") is not None:
            copy_s = row["streamed_bytes"] / reference["link_bytes_per_s"]
            row["bound_s"] = round(max(reference["step_s"], copy_s), 4)
            row["step_by_bound"] = round(row["step_s"] / row["bound_s"], 4)
    print(json.dumps(row), flush=True)
    if options.rows is not None:
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


@contextmanager
def ballast(cap_gib: float) -> Iterator[None]:
    """Leave so many GiB of the device free meanwhile."""
    command = [sys.executable, "-m", "tests.benchmarks.offload_bench", "--ballast", str(cap_gib)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def hold_ballast(cap_gib: float) -> None:
    """Take what exceeds the cap, until killed."""
    import torch

    torch.zeros(1, device="cuda")
    surplus = torch.cuda.mem_get_info()[0] - int(cap_gib * GIB)
    held = torch.empty(max(0, surplus), dtype=torch.uint8, device="cuda")
    print(held.numel(), flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def _is_installed(name: str) -> bool:
    from tests.benchmarks.offloaders import PACKAGES

    package = PACKAGES.get(name)
    if package is None or find_spec(package) is not None:
        return True
    print(f"{name} is left out: install {package}", file=sys.stderr)
    return False


def _arguments() -> argparse.Namespace:
    from tests.benchmarks.offloaders import NAMES

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=Path, help="directory of the weights, made if empty")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="flux")
    parser.add_argument("--caps", type=float, nargs="+", default=[16.0, 12.0, 8.0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--offloaders", choices=NAMES, nargs="+", default=["stream", "group"])
    parser.add_argument("--host-gib", type=float, nargs="+", default=[None])
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--ballast", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ballast is None and options.weights is None:
        parser.error("--weights DIR is needed: 22 GiB for flux, 30 GiB for ltx2")
    return options


if __name__ == "__main__":
    main()

"""Torture a batch of the miniature and print what became of it, as JSON.

usage: python -m tests.benchmarks.batch_torture [--rows 200] [--blows 40] [--seed 1]
           [--without-disk] [--deployed]

Blows fall on stage process, flow, server and disk in turn, and with --deployed on the worker. A
small disk of its own, in memory, is mounted for store and output folder, which takes root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from stages.models import resolve_model
from tests.support.torture import Torture, rows, small_disk, undisturbed

EDGE, NUM_STEPS = 64, 4
DISK_NBYTES = 96 * 2**20
BETWEEN_S = (0.5, 5.0)
ARGUMENTS = {
    "num_inference_steps": NUM_STEPS,
    "guidance_scale": 1,
    "height": EDGE,
    "width": EDGE,
}


def main() -> int:
    """Play; exit code 1 if anything is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--blows", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-disk", action="store_true")
    parser.add_argument("--deployed", action="store_true", help="a worker runs the batch")
    options = parser.parse_args()
    targets = ["child", "flow", "server", *([] if options.without_disk else ["disk"])]
    targets += ["worker"] if options.deployed else []
    if not options.without_disk and os.geteuid():
        sys.exit("a disk of its own takes root; run as root or give --without-disk")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exeunt-torture-") as name:
        folder, model, table = Path(name), resolve_model("miniature"), rows(options.rows)
        disk = folder / "disk"
        mounted = nullcontext() if options.without_disk else small_disk(disk, DISK_NBYTES)
        with mounted:
            disk.mkdir(exist_ok=True)
            torture = Torture(
                folder,
                model,
                table,
                ARGUMENTS,
                chunk=50,
                disk=disk,
                deployed=options.deployed,
                environ={"OMP_NUM_THREADS": "1"},
            )
            try:
                blows = [targets[n % len(targets)] for n in range(options.blows)]
                torture.play(
                    blows, seed=options.seed, between_s=BETWEEN_S,
                    tell=lambda text: print(text, flush=True),
                )  # fmt: skip
                torture.finish()
                expected = undisturbed(model, table, edge=EDGE, num_steps=NUM_STEPS, num_threads=1)
                verdict = torture.judge(expected)
            finally:
                torture.stop()
    elapsed_s = round(time.monotonic() - started)
    print(json.dumps({**vars(verdict), "elapsed_s": elapsed_s}))
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

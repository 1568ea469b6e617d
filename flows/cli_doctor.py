"""`exeunt doctor`: prints what this machine can do; the exit code says if anything is wrong."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.doctor import examine
from flows.exit_codes import EXIT_OK, EXIT_STAGE_FAILED
from flows.settings import RunSettings
from stages.rules import check_device_name
from stages.shown_sizes import show_nbytes


def run(name: str, arguments: list[str]) -> int:
    """Examine this machine; returns the exit code.

    Raises:
        RequestError: An argument or an environment variable cannot be used.
    """
    options = _parser(name).parse_args(arguments)
    settings = RunSettings.from_env()
    if options.device is not None:
        settings = replace(settings, device=check_device_name(options.device))
    found = examine(settings, options.directory)
    if options.json:
        print(json.dumps(found))
    else:
        for title, text in lines(found):
            print(f"{title:<10} {text}")
        for problem in found["problems"]:
            print(f"exeunt: error: {problem}", file=sys.stderr)
    return EXIT_STAGE_FAILED if found["problems"] else EXIT_OK


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Measure what this machine can do: GPU, driver and native allocator, rates to "
        "the device and from the disk, memory, Prefect, home and store. A machine without a GPU "
        "is nothing wrong. Rates are kept for `exeunt plan`; measure while nothing else runs.",
        epilog="exit codes:\n  0  nothing is wrong\n  2  bad input\n  3  something is wrong, as "
        "the errors say",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="read files of this folder for a rate, such as a model's; by default the home",
    )
    parser.add_argument(
        "--device", metavar="TEXT", help="cpu, cuda or cuda:N; by default what a run would use"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The examination for people: a title and a text a line."""
    yield "device", _device(found)
    yield from _gpu_lines(found)
    if (memory := found["memory"]) is not None:
        limit = show_nbytes(memory["limit_bytes"])
        left = show_nbytes(memory["available_bytes"])
        yield "memory", f"{left} left by {memory['limited_by']}, limit {limit}"
    if (file := found["file"]) is not None:
        first, again = (_rate(file[f"{n}_bytes_per_s"]) for n in ("first", "again"))
        yield "file", f"{first} at first, {again} from memory: {file['path']}"
    home, store = found["home"], found["store"]
    if home["is_writable"]:
        yield "home", f"{home['path']} can be written, {show_nbytes(home['free_bytes'])} free"
    else:
        yield "home", f"{home['path']} cannot be written"
    yield "store", f"{store['url']} {'can' if store['is_writable'] else 'cannot'} be written"
    yield "prefect", _prefect(found["prefect"])
    if changed := found["prefect"]["overridden"]:
        yield "", f"set by you: {', '.join(f'{name}={value}' for name, value in changed.items())}"
    if found["kept_in"]:
        yield "kept", f"{found['kept_in']}, for `exeunt plan`"


def _device(found: dict[str, Any]) -> str:
    text = f"{found['device']}, {found['num_cpus']} CPU cores"
    if found["gpu"] is None and found["gpu_device_file"] is None:
        return f"{text}, no GPU: stages compute on the CPU with mapped weights"
    return text


def _gpu_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if (gpu := found["gpu"]) is not None:
        capability = ".".join(map(str, gpu["compute_capability"]))
        total, free = show_nbytes(gpu["total_bytes"]), show_nbytes(gpu["free_bytes"])
        yield "gpu", f"{gpu['name']}, compute capability {capability}, {free} of {total} free"
    if (driver := found["driver"]) is not None:
        yield "driver", driver
    if (torch := found["torch"]) is not None:
        yield "torch", f"{torch['version']}, CUDA {torch['cuda'] or 'none'}"
    if (native := found["native"]) is not None:
        text = "available" if native["is_available"] else f"not available: {native['reason']}"
        if gpu is not None and gpu["has_read_only_registration"] is not None:
            can = "can" if gpu["has_read_only_registration"] else "cannot"
            text += f"; the device {can} read weight files by itself"
        yield "native", text
    if (rates := found["rates"]) is not None:
        pinned, pageable = (_rate(rates[f"{n}_bytes_per_s"]) for n in ("pinned", "pageable"))
        yield "link", f"{pinned} from pinned memory, {pageable} from pageable memory"
        yield "products", f"{rates['flops_per_s'] / 1e12:.1f} TFLOP/s in bfloat16"


def _prefect(prefect: dict[str, Any]) -> str:
    if prefect["api_url"] is None:
        return "no server was started yet; a run starts one"
    health = "answers" if prefect["is_healthy"] else "does not answer"
    text = f"{prefect['api_url'].removesuffix('/api')} {health} ({prefect['mode']})"
    if prefect["mode"] == "local" and not prefect["is_healthy"]:
        text += "; a run starts it again"
    return text


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"

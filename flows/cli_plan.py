"""`exeunt plan`: what a run of a model would need, without a GPU and without loading anything."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from flows.exit_codes import EXIT_BAD_INPUT, EXIT_OK
from flows.machine import kept_rates
from flows.model_settings import model_settings
from flows.settings import RunSettings
from stages.errors import RequestError
from stages.families import FAMILIES, family_named
from stages.forecast_records import ComponentForecast, ModelForecast
from stages.forecasts import forecast_model
from stages.models import ModelDirectory, open_model, resolve_model
from stages.offload_rules import choose_offload

DEFAULT_STEPS = 8
DEFAULT_GUIDANCE = 1.0
DEFAULT_TOKENS = 512
GIB = 1 << 30


def run(name: str, arguments: list[str]) -> int:
    """Forecast a model; returns the exit code.

    Raises:
        StageError: The model or an argument is at fault.
    """
    options = _parser(name).parse_args(arguments)
    rates = kept_rates(RunSettings.from_env().home)
    if options.tflops is not None:
        if not 0 < options.tflops < float("inf"):
            raise RequestError(f"tflops is {options.tflops}, expected a positive number")
        rates = replace(rates, flops_per_s=options.tflops * 1e12, source=rates.source or "as given")
    directory = resolve_model(options.model)
    _require_pictures(open_model(directory))
    own = model_settings(directory)
    steps, guidance = options.num_inference_steps, options.guidance_scale
    found = forecast_model(
        directory,
        height=options.height,
        width=options.width,
        num_inference_steps=own.get("num_inference_steps", DEFAULT_STEPS)
        if steps is None
        else steps,
        guidance_scale=own.get("guidance_scale", DEFAULT_GUIDANCE)
        if guidance is None
        else guidance,
        max_sequence_length=options.max_sequence_length,
        dtype=options.dtype,
        choice=choose_offload(
            options.offload, options.device_budget, options.host_budget, link_rate=options.link_rate
        ),
        rates=rates,
    )
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        _tell(found)
    return EXIT_OK if found.fits else EXIT_BAD_INPUT


def _require_pictures(model: ModelDirectory) -> None:
    """Refuse a model that makes videos: what a frame takes says nothing of what they take."""
    for name in FAMILIES:
        family = family_named(name)
        if family.output == "videos" and model.class_name in (*family.models, family.pipeline):
            raise RequestError(
                f"model {model.directory} makes videos ({family.name}), but only pictures are "
                "forecast so far; `exeunt doctor` tells what the machine has"
            )


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Forecast device, host and disk memory and the time of one picture, phase by "
        "phase, from a model's configurations and headers. Needs no GPU and loads no weights.",
        epilog="exit codes:\n  0  every phase fits\n  2  a phase does not fit, or bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory, or miniature")
    add = parser.add_argument
    add("--height", type=int, metavar="N", help="pixels; by default what the VAE was trained at")
    add("--width", type=int, metavar="N", help="pixels; by default what the VAE was trained at")
    add("--num-inference-steps", type=int, metavar="N", help="by default the model's own")
    add("--guidance-scale", type=float, metavar="X", help="over 1 computes every step twice")
    add("--max-sequence-length", type=int, metavar="N", default=DEFAULT_TOKENS,
        help=f"tokens of the prompt (default: {DEFAULT_TOKENS})")  # fmt: skip
    add("--dtype", default="auto", metavar="TEXT", help="compute dtype (default: auto)")
    add("--offload", choices=["auto", "resident", "stream", "low_memory"],
        help="by default DDO_PRESET, else auto")  # fmt: skip
    add("--device-budget", metavar="SIZE", help="device memory such as 12GiB; by default the GPU "
        "that `exeunt doctor` has measured here, else no limit")  # fmt: skip
    add("--host-budget", metavar="SIZE", help="host memory that may be pinned, such as 8GiB")
    add("--link-rate", metavar="SIZE", help="bytes per second to the device, such as 25GB; by "
        "default what `exeunt doctor` has measured")  # fmt: skip
    add("--tflops", type=float, metavar="X", help="the device's matrix products, in 10^12 "
        "operations per second; by default what `exeunt doctor` has measured")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser


_COLUMNS = ("phase", "component", "plan", "device", "pinned", "anonymous", "disk", "step", "time")


def _tell(found: ModelForecast) -> None:
    job = found.job
    budget = "no limit" if found.device_budget is None else _size(found.device_budget)
    print(
        f"{found.model}: {job.width} x {job.height} pixels, {job.num_inference_steps} steps, "
        f"{job.dtype}, preset {found.preset}, device budget {budget}"
    )
    rows = [_COLUMNS, *(_row(each) for each in found.components)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    for row in rows:
        cells = [
            text.ljust(width) if k < 3 else text.rjust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print(f"at most {_size(found.device_bytes)} of the device, {_time(found.elapsed_s)} a picture")
    for note in found.notes:
        print(f"- {note}")
    for each in found.components:
        if each.problem:
            where = f"phase {each.phase}, {each.component}"
            print(f"exeunt: error: {where}: {each.problem}", file=sys.stderr)


def _row(each: ComponentForecast) -> tuple[str, ...]:
    return (
        each.phase,
        each.component,
        each.mode or "none fits",
        _size(each.device_bytes) if each.mode else "-",
        _size(each.pinned_bytes) if each.mode else "-",
        _size(each.anonymous_bytes) if each.mode else "-",
        _size(each.disk_bytes),
        _time(each.step_s),
        _time(each.elapsed_s),
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

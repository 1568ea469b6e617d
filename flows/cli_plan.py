"""`exeunt plan`: what a run would need, without a GPU and without loading anything.

The arguments are those of the family's own command, checked as there; so its defaults hold here.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flows.cli_arguments import add_flow_arguments
from flows.exit_codes import EXIT_BAD_INPUT, EXIT_OK
from flows.job_forecast import forecast_job, num_outputs
from flows.machine import kept_rates
from flows.settings import RunSettings
from stages.errors import ModelError, RequestError
from stages.families import FAMILIES, family_named
from stages.forecast_records import ComponentForecast, ModelForecast
from stages.models import open_model, resolve_model
from stages.offload_rules import choose_offload
from stages.shown_sizes import show_nbytes

OWN_OPTIONS = {"json", "link_rate", "tflops"}
PROMPT = "what is painted changes no forecast"


def run(name: str, arguments: list[str]) -> int:
    """Forecast a run; returns the exit code.

    Raises:
        StageError: The model or an argument is at fault.
    """
    from flows.cli import FAMILIES as MODULES
    from flows.cli_family import UNCHECKED

    if not arguments or arguments[0].startswith("-"):
        _help(name).parse_args(arguments)
    first, rest = arguments[0], arguments[1:]
    if first in MODULES:
        command, given = first, rest
    else:
        command, given = command_for(first), ["--model", first, *rest]
    module = importlib.import_module(MODULES[command][0])
    parser = _parser(f"{name} {first}", _function(module))
    if not any(word.partition("=")[0] == "--prompt" for word in given):
        given = ["--prompt", PROMPT, *given]
    options = vars(parser.parse_args(given))
    settings = RunSettings.from_env()
    rates = kept_rates(settings.home)
    if (tflops := options["tflops"]) is not None:
        if not 0 < tflops < float("inf"):
            raise RequestError(f"tflops is {tflops}, expected a positive number")
        rates = replace(rates, flops_per_s=tflops * 1e12, source=rates.source or "as given")
    choice = choose_offload(
        options["offload"],
        options["device_budget"],
        options["host_budget"],
        link_rate=options["link_rate"],
    )
    left_out = OWN_OPTIONS | UNCHECKED
    values = {name: value for name, value in options.items() if name not in left_out}
    with _nothing_written() as folder:
        job = module.check(**values | {"output": folder})
    found = forecast_job(job, choice=choice, rates=rates)
    prompts, outputs = num_outputs(job)
    if options["json"]:
        document = {"num_outputs": outputs, "run_s": found.run_s(prompts, outputs)}
        print(json.dumps(found.to_json() | document))
    else:
        _tell(found, prompts, outputs)
    return EXIT_OK if found.fits else EXIT_BAD_INPUT


def command_for(model: str) -> str:
    """The family's command for a model directory, by the pipeline class in its index.

    Raises:
        ModelError: No family takes it.
    """
    from flows.cli import FAMILIES as MODULES

    opened = open_model(resolve_model(model))
    for name in FAMILIES:
        family = family_named(name)
        if opened.class_name in (*family.models, family.pipeline):
            return max((each for each in MODULES if _is_of(name, each)), key=len, default=name)
    raise ModelError(
        f"model {opened.directory} is a {opened.class_name}, which no family here takes; "
        "`exeunt --help` lists the families"
    )


def _is_of(family: str, command: str) -> bool:
    """Whether a command runs a family: one may stand for several, as wan for wan22-i2v."""
    words, wanted = family.replace("wan22", "wan").split("-"), command.split("-")
    return words[: len(wanted)] == wanted


@contextmanager
def _nothing_written() -> Iterator[str]:
    """While open, a check that a run could write its files tries that elsewhere."""
    before = os.environ.get("EXEUNT_STORE")
    with tempfile.TemporaryDirectory(prefix="exeunt-plan-") as folder:
        os.environ["EXEUNT_STORE"] = folder
        try:
            yield folder
        finally:
            del os.environ["EXEUNT_STORE"]
            if before is not None:
                os.environ["EXEUNT_STORE"] = before


def _function(module: Any) -> Callable[..., Any]:
    flow = getattr(module, module.__name__.rpartition(".")[2])
    function: Callable[..., Any] = inspect.unwrap(flow.fn)
    return function


_ABOUT = (
    "Forecast device, host and disk memory and the time of one picture or video, phase by phase, "
    "from a model's configurations and headers. Needs no GPU and loads no weights."
)
_EXIT_CODES = "exit codes:\n  0  every phase fits\n  2  a phase does not fit, or bad input"


def _help(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description=_ABOUT,
        usage=f"exeunt {name} MODEL [OPTION ...], or exeunt {name} FAMILY [OPTION ...]",
        epilog="options: those of the family's command, and --json, --link-rate, --tflops; "
        f"`exeunt {name} FAMILY --help` lists them\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("MODEL", help="a model directory, or a family's command with its options")
    return parser


def _parser(name: str, function: Callable[..., Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description=_ABOUT,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flow_arguments(parser, function)
    add = parser.add_argument
    add("--link-rate", metavar="SIZE", help="bytes per second to the device, such as 25GB; by "
        "default what `exeunt doctor` has measured")  # fmt: skip
    add("--tflops", type=float, metavar="X", help="the device's matrix products, in 10^12 "
        "operations per second; by default what `exeunt doctor` has measured")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser


_COLUMNS = ("phase", "component", "plan", "device", "pinned", "anonymous", "disk", "step", "time")


def _tell(found: ModelForecast, prompts: int, outputs: int) -> None:
    job = found.job
    budget = "no limit" if found.device_budget is None else show_nbytes(found.device_budget)
    frames = f" x {job.num_frames} frames" if job.num_frames > 1 else ""
    print(
        f"{found.model}: {job.family}, {job.task}, {job.width} x {job.height} pixels{frames}, "
        f"{job.num_inference_steps} steps, {job.dtype}, preset {found.preset}, "
        f"device budget {budget}"
    )
    rows = [_COLUMNS, *(_row(each) for each in found.components)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_COLUMNS))]
    for row in rows:
        cells = [
            text.ljust(width) if k < 3 else text.rjust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    noun = "video" if job.num_frames > 1 else "picture"
    each_takes = f"{_time(found.elapsed_s)} a {noun}"
    if outputs > 1:
        each_takes += f", {_time(found.run_s(prompts, outputs))} for {outputs} {noun}s"
    print(f"at most {show_nbytes(found.device_bytes)} of the device, {each_takes}")
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
        show_nbytes(each.device_bytes) if each.mode else "-",
        show_nbytes(each.pinned_bytes) if each.mode else "-",
        show_nbytes(each.anonymous_bytes) if each.mode else "-",
        show_nbytes(each.disk_bytes),
        _time(each.step_s),
        _time(each.elapsed_s),
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

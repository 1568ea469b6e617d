"""`exeunt batch`: every row of a table through a family's flow."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import FAMILIES, tell_interrupted
from flows.cli_arguments import add_flow_arguments
from flows.cli_family import (
    HELP_OPTIONS,
    VERBOSE_OPTION,
    announce,
    call_flow,
    connected,
    serve_pictures,
    tell_error,
    watched,
)
from flows.display import showing
from flows.exit_codes import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STAGE_FAILED,
    exit_code,
)
from flows.launch import shared_launcher
from flows.prefect_profile import apply_profile
from flows.server import begin
from flows.settings import RunSettings
from stages.errors import RequestError, StageError

if TYPE_CHECKING:
    from flows.batch.flow import BatchSummary

OPTIONS = (
    *("table", "family", "output", "name", "chunk", "retry", "strict", "overwrite"),
    *("max_failures", "forecast", "report", "json", "verbose"),
)
"""The batch's own; every other one is an argument of the family."""


def run(command: str, arguments: list[str]) -> int:
    """Run the batch; returns the exit code.

    Raises:
        StageError: The table, an argument or the model is at fault.
    """
    first, _ = _parser(command, is_whole=False).parse_known_args(arguments)
    is_help = bool(HELP_OPTIONS & set(arguments))
    if first.family is None:
        _parser(command).parse_args(arguments)  # tells the help, or what is missing
    settings = RunSettings.from_env()
    if VERBOSE_OPTION not in arguments:  # our own display tells; the server keeps the log
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    apply_profile(settings.home)
    if is_help:
        _family_parser(command, first.family).parse_args(arguments)
        return EXIT_OK
    starting = begin(settings.home)
    announced = announce(settings.home)
    launcher = shared_launcher(settings.launch)
    try:
        options = vars(_family_parser(command, first.family).parse_args(arguments))
        values = {name: options.pop(name) for name in OPTIONS}
        as_json, _ = values.pop("json"), values.pop("verbose")
        wants_page = values.pop("report")
        values["arguments"] = _one_prompt(options)
        launcher.expect(first.family)
        launcher.start_fork_server()
        server = starting.wait()
        serve_pictures(server, settings)
        with connected(server, announced), watched(server, settings.home):
            code = _run(values, as_json, settings)
            if wants_page:
                _tell_page(Path(values["output"]), settings)
            return code
    finally:
        launcher.close()


def _run(values: dict[str, Any], as_json: bool, settings: RunSettings) -> int:
    from flows.batch.flow import batch

    try:
        with _display(as_json):
            summary: BatchSummary = call_flow(batch, values, settings.home)
    except KeyboardInterrupt:
        tell_interrupted(", and the same command goes on from it")
        return EXIT_INTERRUPTED
    except StageError as error:
        tell_error(error, as_json)
        return exit_code(error)
    if as_json:
        print(json.dumps({"event": "finished", **summary.model_dump()}), flush=True)
    else:
        print(_sentence(summary), file=sys.stderr)
    return EXIT_OK if summary.is_whole else EXIT_STAGE_FAILED


def _tell_page(output: Path, settings: RunSettings) -> None:
    """Write the report of a batch that has come to any results, also of one that was stopped."""
    from flows.cli_report import write_batch_page
    from flows.reports.of_batch import is_batch

    if is_batch(output):
        page = write_batch_page(output, settings.home.reports)
        print(f"its report is {page}", file=sys.stderr)


def _sentence(summary: BatchSummary) -> str:
    counts = [f"{summary.num_done} of {summary.num_rows} rows done"]
    if summary.num_failed:
        counts.append(f"{summary.num_failed} failed")
    if summary.num_invalid:
        counts.append(f"{summary.num_invalid} could not run")
    return f"{', '.join(counts)}; see {summary.results}"


@contextmanager
def _display(as_json: bool) -> Iterator[None]:
    from flows.batch.display import BatchJson, to_stream
    from flows.batch.live import BatchLive

    if as_json:
        with showing(BatchJson(sys.stdout)):
            yield
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        live = BatchLive(sys.stderr)
        with showing(live), live.shown():
            yield
    else:
        with showing(to_stream(sys.stderr)):
            yield


# ---- options -------------------------------------------------------------------------------


def _parser(command: str, *, is_whole: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {command}",
        description="Run a family's flow for every row of a table, phase by phase. The same "
        "command goes on where an earlier one was stopped.",
        epilog=f"`exeunt {command} TABLE --family F --help` lists the family's arguments.\n\n"
        f"{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=is_whole,
        allow_abbrev=False,
        exit_on_error=is_whole,
    )
    parser.add_argument(
        "table",
        nargs=None if is_whole else "?",
        metavar="TABLE",
        help="a .parquet, .csv, .tsv or .jsonl file, or a folder of such files",
    )
    own = parser.add_argument_group("batch")
    own.add_argument(
        "--family", required=is_whole, choices=sorted(FAMILIES), metavar="F", help="whose flow"
    )
    own.add_argument(
        "--output", default="batch", metavar="DIR", help="folder for files, journal and results"
    )
    own.add_argument(
        "--name",
        default="{id}",
        metavar="TEMPLATE",
        help="makes file names, such as {row:05d}-{prompt} (default: {id})",
    )
    own.add_argument(
        "--chunk",
        type=int,
        default=500,
        metavar="N",
        help="rows that go through the phases together (default: 500)",
    )
    own.add_argument(
        "--retry", choices=["failed", "done"], help="run such rows of an earlier start again"
    )
    own.add_argument("--strict", action="store_true", help="refuse the batch if a row is bad")
    own.add_argument(
        "--overwrite", action="store_true", help="replace files that this batch has not made"
    )
    own.add_argument(
        "--no-forecast",
        dest="forecast",
        action="store_false",
        help="run a batch all the same that disk or memory cannot hold",
    )
    limits = own.add_mutually_exclusive_group()
    limits.add_argument(
        "--max-failures", type=int, metavar="N", help="failed rows that end the batch"
    )
    limits.add_argument(
        "--fail-fast",
        dest="max_failures",
        action="store_const",
        const=1,
        help="end the batch at the first row that fails",
    )
    own.add_argument(
        "--report", action="store_true", help="write a page of the batch into its folder at the end"
    )
    own.add_argument(VERBOSE_OPTION, action="store_true", help="show Prefect's log as well")
    own.add_argument("--json", action="store_true", help="print one JSON document per event")
    return parser


def _family_parser(command: str, family: str) -> argparse.ArgumentParser:
    from flows.batch.families import batch_family

    chosen = batch_family(family)
    parser = _parser(command)
    group = parser.add_argument_group(f"{family}, for rows that leave it empty")
    add_flow_arguments(group, chosen.function, names=chosen.shared)
    return parser


def _one_prompt(options: dict[str, Any]) -> dict[str, Any]:
    """The family's arguments; a prompt for all rows is one text."""
    prompt = options.get("prompt")
    if isinstance(prompt, list):
        if len(prompt) > 1:
            raise RequestError(f"--prompt is given {len(prompt)} times; one serves all rows")
        options["prompt"] = prompt[0]
    return options

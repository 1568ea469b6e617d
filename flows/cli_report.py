"""`exeunt report`: one HTML page of a run, to look at and to pass on; or runs as a dataset."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flows.exit_codes import EXIT_OK
from flows.reports.dataset import export
from flows.reports.of_batch import batch_report, is_batch, read_batch
from flows.reports.of_run import find_run, run_folders, run_report
from flows.reports.page import write_page
from flows.settings import RunSettings
from stages.errors import RequestError
from stages.stage_report import json_schema

ALL = "all"
BATCH_PAGE = "report.html"
"""In a batch's output folder."""


def run(name: str, arguments: list[str]) -> int:
    """Write the page of a run, or put runs into a dataset; returns the exit code."""
    parser = _parser(name)
    options = parser.parse_args(arguments)
    if options.schema:
        print(json_schema(), end="")
        return EXIT_OK
    if options.run is None:
        parser.error(
            "RUN is missing: a run's id, its start, `last`, a batch's folder, or `all` with "
            "--dataset"
        )
    reports = RunSettings.from_env().home.reports
    if options.dataset is not None:
        return _export(reports, options)
    if options.run == ALL:
        raise RequestError("a page shows one run; name one, or put all into a --dataset")
    return _write_page(reports, options)


def write_batch_page(output: Path, reports: Path) -> Path:
    """Write the page of a batch into its folder.

    Raises:
        RequestError: Its results cannot be read, or the page cannot be written.
    """
    folder = output.expanduser().absolute()
    return write_page(batch_report(folder, reports), folder / BATCH_PAGE)


def _write_page(reports: Path, options: argparse.Namespace) -> int:
    if is_batch(output := Path(options.run).expanduser().absolute()):
        report = batch_report(output, reports)
        path = options.output or output / BATCH_PAGE
    else:
        folder = find_run(reports, options.run)
        report = run_report(folder)
        path = options.output or (report.folder or folder) / f"report-{folder.name[:8]}.html"
    path = write_page(report, path.expanduser().absolute(), embed=options.embed)
    if options.json:
        print(json.dumps({"page": str(path), "run": report.run_id, "state": report.state}))
    else:
        print(path)
    return EXIT_OK


def _export(reports: Path, options: argparse.Namespace) -> int:
    dataset = options.dataset.expanduser().absolute()
    if options.run == ALL:
        folders: Sequence[Path] = run_folders(reports)
    elif is_batch(output := Path(options.run).expanduser().absolute()):
        folders = read_batch(output, reports).reports
    else:
        folders = [find_run(reports, options.run)]
    done = export(folders, dataset)
    if options.json:
        print(json.dumps({"dataset": str(dataset), **asdict(done)}))
        return EXIT_OK
    told = [f"{done.num_written} runs written to {dataset}"]
    told += [f"{done.num_unchanged} were there"] if done.num_unchanged else []
    told += [f"{done.num_empty} have left nothing"] if done.num_empty else []
    told += [f"{done.num_unread} could not be read"] if done.num_unread else []
    print(", ".join(told))
    return EXIT_OK


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Write one HTML page of a run or a batch: its pictures with their settings, "
        "what each phase took, memory over time, what was found, what fell back and what failed. "
        "The page needs no network. With --dataset, put runs into parquet files instead.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="a run's id or its start, `last`, or a batch's output folder; `all` with --dataset",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; by default it lies beside the pictures, which it links by relative paths",
    )
    parser.add_argument(
        "--embed", action="store_true", help="put the pictures themselves into the page"
    )
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="DIR",
        help="a folder of parquet files, to which the run is added or in which it is replaced",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of a stage's report"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser

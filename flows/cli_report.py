"""`exeunt report`: one HTML page of a run, to look at and to pass on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flows.exit_codes import EXIT_OK
from flows.reports.of_run import find_run, run_report
from flows.reports.page import write_page
from flows.settings import RunSettings


def run(name: str, arguments: list[str]) -> int:
    """Write the page of a run; returns the exit code."""
    options = _parser(name).parse_args(arguments)
    reports = RunSettings.from_env().home.reports
    folder = find_run(reports, options.run)
    report = run_report(folder)
    path = options.output or (report.folder or folder) / f"report-{folder.name[:8]}.html"
    path = write_page(report, path.expanduser().absolute(), embed=options.embed)
    if options.json:
        print(json.dumps({"page": str(path), "run": report.run_id, "state": report.state}))
    else:
        print(path)
    return EXIT_OK


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Write one HTML page of a run: its pictures with their settings, what each "
        "phase took, memory over time, what was found, what fell back and what failed. The page "
        "needs no network.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's id or its start, or `last`")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; by default it lies beside the pictures, which it links by relative paths",
    )
    parser.add_argument(
        "--embed", action="store_true", help="put the pictures themselves into the page"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser

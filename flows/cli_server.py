"""`exeunt up`, `down`, `status` and `prune`: the Prefect server and worker of this machine."""

from __future__ import annotations

import argparse
import json
from datetime import timedelta

from flows.exit_codes import EXIT_OK
from flows.services import Status, down, prune, status, up
from flows.settings import Home, RunSettings

DEFAULT_PRUNE_DAYS = 30.0
MIB = 1024**2


def run(name: str, arguments: list[str]) -> int:
    """Run the command `name`; returns the exit code.

    Raises:
        ServerError: The server or the worker cannot be started or reached.
    """
    options = _parser(name).parse_args(arguments)
    home = RunSettings.from_env().home
    match name:
        case "up":
            _tell_status(up(home, worker=options.worker, deploy=options.deploy), options.json)
        case "down":
            _tell_stopped(down(home), options.json)
        case "status":
            _tell_status(status(home), options.json)
        case _:
            _prune(home, options)
    return EXIT_OK


def _parser(name: str) -> argparse.ArgumentParser:
    texts = {
        "up": "Start what is not there yet: a Prefect server on the loopback interface, the work "
        "pool `exeunt` with the deployments of every flow, and a worker for it.",
        "down": "Stop the worker and the local server. Results stay; a server of yours does too.",
        "status": "Say what runs. Starts nothing.",
        "prune": "Delete old flow runs with their task runs, states and logs from the server's "
        "database. Results are not touched: see `exeunt artifacts gc`.",
    }
    parser = argparse.ArgumentParser(prog=f"exeunt {name}", description=texts[name])
    parser.add_argument("--json", action="store_true", help="print JSON")
    if name == "up":
        parser.add_argument(
            "--worker", action=argparse.BooleanOptionalAction, default=True, help="start a worker"
        )
        parser.add_argument(
            "--deploy",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="create the deployments, or bring them up to date",
        )
    if name == "prune":
        parser.add_argument(
            "--older-than-days",
            type=float,
            default=DEFAULT_PRUNE_DAYS,
            metavar="DAYS",
            help=f"delete runs that ended so long ago (default: {DEFAULT_PRUNE_DAYS:g})",
        )
    return parser


def _tell_status(found: Status, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_json()))
        return
    if found.api_url is None:
        print("server   none was started yet; a run or `exeunt up` starts one")
    else:
        health = "answers" if found.is_healthy else "does not answer"
        print(f"server   {found.api_url.removesuffix('/api')}  {health} ({found.mode})")
    worker = "none" if found.worker_pid is None else f"process {found.worker_pid}"
    print(f"worker   {worker}")
    if found.media_url is not None:
        print(f"pictures {found.media_url}  for the server's pages")
    if found.database_nbytes is not None:
        print(f"database {found.database_nbytes / MIB:.1f} MiB")
    for log in found.logs:
        print(f"log      {log}")


def _tell_stopped(stopped: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"stopped": stopped}))
    else:
        print(f"stopped: {', '.join(stopped)}" if stopped else "nothing of ours was running")


def _prune(home: Home, options: argparse.Namespace) -> None:
    num_deleted = prune(home, timedelta(days=options.older_than_days))
    if options.json:
        print(json.dumps({"deleted": num_deleted}))
    else:
        print(f"{num_deleted} flow runs deleted")

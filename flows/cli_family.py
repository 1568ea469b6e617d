"""Run a family's flow from the command line: options, server, display, result.

What costs seconds starts early and side by side: the Prefect server and the fork server boot
while this process imports Prefect. A command line whose last run found everything in the store
is taken at its word, and starts no fork server.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from flows.cli import tell_interrupted
from flows.cli_arguments import add_flow_arguments
from flows.display import JsonDisplay, LineDisplay, LiveDisplay, Tally, showing
from flows.exit_codes import EXIT_CODES, EXIT_INTERRUPTED, EXIT_OK, exit_code
from flows.launch import shared_launcher
from flows.media_service import begin_media
from flows.prefect_profile import apply_profile
from flows.server import Server, begin, configured_url, read_state
from flows.server_watch import ServerWatch
from flows.settings import Home, RunSettings
from stages.errors import StageError

logger = logging.getLogger(__name__)

HELP_OPTIONS = {"-h", "--help"}
VERBOSE_OPTION = "--verbose"
OWN_OPTIONS = {"json", "verbose"}
UNCHECKED = {"vae_tiling", "embed_settings", "on_truncate", "fresh"}
"""Arguments of every flow that have no wrong values left once they are parsed."""


def run_family(name: str, module_name: str, arguments: list[str]) -> int:
    """Run the flow of a family; returns the exit code.

    Raises:
        StageError: An argument, the model or a stage is at fault.
    """
    if HELP_OPTIONS & set(arguments):
        _parse(name, _function(importlib.import_module(module_name)), arguments)
        return EXIT_OK
    settings = RunSettings.from_env()
    if VERBOSE_OPTION not in arguments:  # our own display tells; the server keeps the log
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    apply_profile(settings.home)
    starting = begin(settings.home)
    announced = announce(settings.home)
    launcher = None
    hint = _hint(settings.home.root, name, arguments)
    if not hint.exists():
        launcher = shared_launcher(settings.launch)
        launcher.expect(name)
        launcher.start_fork_server()
    try:
        module = importlib.import_module(module_name)
        options = _parse(name, _function(module), arguments)
        values = {key: value for key, value in vars(options).items() if key not in OWN_OPTIONS}
        module.check(**{key: value for key, value in values.items() if key not in UNCHECKED})
        server = starting.wait()
        serve_pictures(server, settings)
        with connected(server, announced), watched(server, settings.home):
            code, was_all_found = _run(module, options.json, values, settings.home)
    finally:
        if launcher is not None:
            launcher.close()
    _keep_hint(hint, was_all_found)
    return code


def announce(home: Home) -> str | None:
    """Name the local server in the environment before Prefect, which reads it, is imported.

    Returns:
        The address, or None when the user has a server of their own.
    """
    state = read_state(home)
    if state is None or configured_url(home, os.environ) is not None:
        return None
    os.environ["PREFECT_API_URL"] = state.api_url
    return state.api_url


@contextmanager
def connected(server: Server, announced: str | None) -> Iterator[None]:
    """While open, Prefect talks to `server`, which may not be the one that was announced."""
    if server.mode == "configured" or server.api_url == announced:
        yield
        return
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    is_ephemeral = server.api_url is None
    with temporary_settings(
        {PREFECT_API_URL: server.api_url, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: is_ephemeral}
    ):
        yield


def serve_pictures(server: Server, settings: RunSettings) -> None:
    """Have the pictures of a run shown on its page, where that is a server of ours."""
    if server.mode == "local":
        begin_media(settings.home, settings.store_url)


def watched(server: Server, home: Home) -> AbstractContextManager[object]:
    """While open, a server of ours that ends is started again."""
    return ServerWatch(home, os.environ) if server.mode == "local" else nullcontext()


def call_flow(flow: Any, values: dict[str, Any], home: Home) -> Any:
    """Run a flow; once more if the server ended while the run was being made known to it."""
    try:
        return flow(**values)
    except RuntimeError as error:
        if not _is_unreachable(error):
            raise
        logger.warning("%s; the run begins again when it answers", error)
        begin(home).wait()
        return flow(**values)


def _is_unreachable(error: RuntimeError) -> bool:
    """Whether Prefect could not make a run known to its server: it says so of an HTTP error."""
    import httpx

    return isinstance(error.__cause__, httpx.HTTPError)


def _run(module: Any, as_json: bool, values: dict[str, Any], home: Home) -> tuple[int, bool]:
    """Run the flow; returns the exit code, and whether the store held every result."""
    name = module.__name__.rpartition(".")[2]
    with _display(as_json) as tally:
        try:
            made = call_flow(getattr(module, name), values, home)
        except KeyboardInterrupt:
            tell_interrupted()
            return EXIT_INTERRUPTED, False
        except StageError as error:
            tell_error(error, as_json)
            return exit_code(error), False
    noun = "video" if made and made[0].path.endswith(".mp4") else "picture"
    if as_json:
        document = {
            "event": "finished",
            f"{noun}s": [each.model_dump() for each in made],
            "made": tally.made,
            "found": tally.found,
        }
        print(json.dumps(document), flush=True)
    else:
        count = f"{len(made)} {noun}" if len(made) == 1 else f"{len(made)} {noun}s"
        print(f"{count}, {tally.sentence()}", file=sys.stderr)
    return EXIT_OK, not tally.made


def tell_error(error: StageError, as_json: bool) -> None:
    if as_json:
        document = {"event": "failed", "error": type(error).__name__, "message": str(error)}
        print(json.dumps(document), flush=True)
    print(f"exeunt: error: {error}", file=sys.stderr)


@contextmanager
def _display(as_json: bool) -> Iterator[Tally]:
    if as_json:
        tally = Tally(JsonDisplay(sys.stdout))
        with showing(tally):
            yield tally
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        live = LiveDisplay(sys.stderr)
        tally = Tally(live)
        with showing(tally), live.shown():
            yield tally
    else:
        tally = Tally(LineDisplay(sys.stderr))
        with showing(tally):
            yield tally


def _function(module: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module, module.__name__.rpartition(".")[2]).fn
    return function


def _parse(name: str, function: Callable[..., Any], arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description=(inspect.getdoc(function) or "").partition("\n")[0],
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flow_arguments(parser, function)
    parser.add_argument(VERBOSE_OPTION, action="store_true", help="show Prefect's log as well")
    parser.add_argument("--json", action="store_true", help="print one JSON document per event")
    return parser.parse_args(arguments)


def _hint(home: Path, name: str, arguments: list[str]) -> Path:
    """A file that exists when the last run of this very command line computed nothing."""
    line = json.dumps([name, *arguments, str(Path.cwd())])
    return home / "hints" / hashlib.sha256(line.encode()).hexdigest()[:32]


def _keep_hint(hint: Path, was_all_found: bool) -> None:
    """Leave or remove the hint. A home that cannot be written costs the next run its head start."""
    with suppress(OSError):
        if was_all_found:
            hint.parent.mkdir(parents=True, exist_ok=True)
            hint.touch()
        else:
            hint.unlink(missing_ok=True)

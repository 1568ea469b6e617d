"""The `exeunt` command: one subcommand per family flow, and what keeps the house.

This module imports little, so that `--help` and typing mistakes cost nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from flows.exit_codes import EXIT_CODES, EXIT_INTERRUPTED, EXIT_OK, exit_code
from stages.errors import StageError

FAMILIES = {
    "z-image": ("flows.z_image", "paint pictures with a Z-Image model"),
    "flux": ("flows.flux", "paint pictures with a FLUX.1 model"),
    "flux-kontext": ("flows.flux_kontext", "edit a picture with a FLUX.1 Kontext model"),
    "flux2-klein": ("flows.flux2_klein", "paint pictures with a FLUX.2 Klein model"),
    "sdxl": ("flows.sdxl", "paint pictures with a Stable Diffusion XL model"),
    "sd15": ("flows.sd15", "paint pictures with a Stable Diffusion 1 or 2 model"),
    "pixart": ("flows.pixart", "paint pictures with a PixArt-Sigma model"),
    "sana": ("flows.sana", "paint pictures with a Sana model"),
    "sd3": ("flows.sd3", "paint pictures with a Stable Diffusion 3 or 3.5 model"),
    "qwen-image": ("flows.qwen_image", "paint pictures with a Qwen-Image model"),
    "qwen-image-edit": ("flows.qwen_image_edit", "edit a picture with a Qwen-Image-Edit model"),
    "wan": ("flows.wan", "make videos with a Wan 2.1 or 2.2 model"),
    "wan-vace": ("flows.wan_vace", "make videos along another one with a Wan 2.2 VACE model"),
    "ltx": ("flows.ltx", "make videos with an LTX Video model"),
    "ltx2": ("flows.ltx2", "make videos with sound with an LTX-2 model"),
    "cogvideox": ("flows.cogvideox", "make videos with a CogVideoX model"),
    "hunyuan-video": ("flows.hunyuan_video", "make videos with a HunyuanVideo 1.5 model"),
}
"""Each family's flow module and what it does; the flow has the module's own name."""

COMMANDS: dict[str, tuple[str, str]] = {
    "batch": ("flows.cli_batch", "run a family for every row of a table"),
    "plan": ("flows.cli_plan", "forecast memory and time of a model; needs no GPU"),
    "doctor": ("flows.cli_doctor", "measure what this machine can do"),
    "artifacts": ("flows.cli_artifacts", "list, show, verify and collect stored results"),
    "blocks": ("flows.cli_blocks", "review the code of custom blocks, without which none runs"),
    "report": ("flows.cli_report", "write one page of a run, with its pictures"),
    "up": ("flows.cli_server", "start the Prefect server, with a worker and the deployments"),
    "down": ("flows.cli_server", "stop what `exeunt up` or a run has started"),
    "status": ("flows.cli_server", "say what runs"),
    "prune": ("flows.cli_server", "delete old flow runs from the server's database"),
}


LEAVE_WITHIN_S = 1.7

_is_told = threading.Event()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        tell_interrupted()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except StageError as error:
        print(f"exeunt: error: {error}", file=sys.stderr)
        return exit_code(error)


def _interrupt(*_: object) -> NoReturn:
    """Ctrl-C: leave in an orderly way, but leave.

    The server is told that the run was interrupted; if it is too busy to listen, the process
    ends all the same. Its stage processes see their lifelines close and end with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    timer = threading.Timer(LEAVE_WITHIN_S, _leave)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def tell_interrupted(more: str = "") -> None:
    """Say once that the command was interrupted."""
    if not _is_told.is_set():
        _is_told.set()
        text = f"exeunt: interrupted; what is finished is kept{more}"
        print(text, file=sys.stderr, flush=True)


def _leave() -> NoReturn:
    tell_interrupted()
    os._exit(EXIT_INTERRUPTED)


def _dispatch(arguments: list[str]) -> int:
    parser = _parser()
    known = parser.parse_args(arguments[:1] or ["--help"])
    name, rest = known.command, arguments[1:]
    if name in FAMILIES:
        from flows.cli_family import run_family

        module_name, _ = FAMILIES[name]
        return run_family(name, module_name, rest)
    run: Callable[[str, list[str]], int] = importlib.import_module(COMMANDS[name][0]).run
    return run(name, rest)


def _parser() -> argparse.ArgumentParser:
    lines = [
        *("families:", *(f"  {name:<15} {text}" for name, (_, text) in FAMILIES.items())),
        *("", "housekeeping:", *(f"  {name:<15} {text}" for name, (_, text) in COMMANDS.items())),
        *("", "`exeunt COMMAND --help` says what a command takes.", "", EXIT_CODES),
    ]
    parser = argparse.ArgumentParser(
        prog="exeunt",
        description="Diffusion pictures, staged: every phase in a process of its own that "
        "retires when it is done, every result found again.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="exeunt COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=metadata.version("exeunt"))
    parser.add_argument(
        "command",
        metavar="COMMAND",
        choices=[*FAMILIES, *COMMANDS],
        help="a family or a housekeeping command, listed below",
    )
    return parser

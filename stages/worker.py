"""Child entry: requests in, exactly one answer each out, one exit code.

A child is forked by `stages.forkserver` or started as `python -m stages.worker`; both end in
`live`, so they differ in nothing but the time they take. A spawned child boots in this order:
standard library and contracts, guards against a dead launcher, then whatever the handler of
its first request imports. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import ValidationError

from stages.contracts import Record, StageContext, StageRequest, StageResult
from stages.device_lock import hold_device
from stages.errors import ERROR_TYPES, DependencyError, StageError
from stages.protocol import (
    EXIT_BAD_REQUEST,
    EXIT_DONE,
    EXIT_EVENTS_CLOSED,
    EXIT_ORPHANED,
    EXIT_TERMINATED,
    EXIT_WORKER_BUG,
    Done,
    Failed,
    Progress,
    Ready,
    Run,
    Warn,
)

HANDLERS = {
    "inspect": "stages.inspect:run",
    "encode": "stages.encode:run",
    "condition": "stages.condition:run",
    "denoise": "stages.denoise:run",
    "decode": "stages.decode:run",
}
HANDLERS_VARIABLE = "EXEUNT_STAGE_HANDLERS"

OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
OUT_OF_MEMORY_NAMES = {"MemoryError", "OutOfMemoryError", "OutOfMemory"}
# CUDA's libraries allocate by themselves, and torch tells of it in a plain RuntimeError.
OUT_OF_MEMORY_TEXTS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


class Terminated(BaseException):
    """SIGTERM arrived: what is open unwinds, so that temporary files go, and the child ends."""


class Events:
    """The way up to the launcher; any thread of a stage may use it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # guards the pipe: a line in two pieces is no event

    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        """Tell where the request stands; see `stages.protocol.Progress`."""
        self.send(
            Progress(activity=activity, step=step, num_steps=num_steps, message=_utf8(message))
        )

    def warn(self, message: str) -> None:
        """Tell the user something that does not stop the request."""
        self.send(Warn(message=_utf8(message)))

    def send(self, event: Record) -> None:
        """Write one event; blocks while the launcher is behind by a pipe's capacity."""
        self.send_line(event.model_dump_json().encode())

    def send_line(self, line: bytes) -> None:
        rest = memoryview(line + b"\n")
        with self._lock:
            while rest:
                rest = rest[os.write(self._fd, rest) :]


Handler = Callable[[StageRequest, StageContext, Events], tuple[StageResult, dict[str, Any]]]


def handler_for(stage: str) -> Handler:
    """The function that runs a stage; its module is imported now, not before.

    `EXEUNT_STAGE_HANDLERS` may name a module whose `HANDLERS` replaces the table: tests put
    tiny stages there.
    """
    replacement = os.environ.get(HANDLERS_VARIABLE)
    table = importlib.import_module(replacement).HANDLERS if replacement else HANDLERS
    module, _, function = table[stage].partition(":")
    handler: Handler = getattr(importlib.import_module(module), function)
    return handler


def serve(request_fd: int, event_fd: int, handlers: Callable[[str], Handler] = handler_for) -> int:
    """Answer requests until the request pipe closes.

    Args:
        request_fd: Read end of the pipe that brings `Run` lines. Borrowed.
        event_fd: Write end of the pipe that takes events. Borrowed.
        handlers: Gives the function of a stage; it may import.

    Returns:
        The exit code, out of `stages.protocol.EXIT_MEANINGS`.

    Raises:
        Terminated: SIGTERM arrived.
    """
    events = Events(event_fd)
    try:
        events.send(Ready(pid=os.getpid(), elapsed_s=process_age_s()))
        with os.fdopen(request_fd, "rb", closefd=False) as lines:
            for line in lines:
                try:
                    run = Run.model_validate_json(line)
                except ValidationError as error:
                    print(f"request line is no request: {error}", file=sys.stderr)
                    return EXIT_BAD_REQUEST
                events.send_line(_answer(run, handlers, events))
    except BrokenPipeError:
        return EXIT_EVENTS_CLOSED
    return EXIT_DONE


def _answer(run: Run, handlers: Callable[[str], Handler], events: Events) -> bytes:
    """The one line that answers a request, whatever its handler does."""
    # The label is no part of a request's JSON, which is its cache key.
    request, context = run.request.model_copy(update={"label": run.label}), run.context
    try:
        try:
            handler = handlers(request.stage)
        except ImportError as error:
            raise DependencyError(
                f"phase {request.stage} needs a library that cannot be imported: {error}; "
                f"install it into {sys.prefix}"
            ) from error
        if context.device.startswith("cuda"):
            hold_device(
                context.device,
                context.home_dir,
                lambda holder: events.progress("waiting", message=holder),
            )
            events.progress("loading")  # its time counts from here
        result, report = handler(request, context, events)
        # Made into text here: a report that JSON cannot hold fails the request, not the child.
        return Done(result=result, report=report).model_dump_json().encode()
    except Terminated:
        raise
    except BaseException as error:
        answer = failure(error, request.stage).model_dump_json().encode()
    # The failed request's tensors hang on its frames, and those perhaps in a cycle: the next
    # request, which may be the same one asked more modestly, needs their memory.
    gc.collect()
    return answer


def failure(error: BaseException, stage: str) -> Failed:
    """What crosses the pipe for an error: a type that the launcher knows, and the reason."""
    names = [kind.__name__ for kind in type(error).__mro__]
    text = _utf8(str(error))
    if isinstance(error, StageError):
        name = next(name for name in names if name in ERROR_TYPES)
        message = text
    elif OUT_OF_MEMORY_NAMES.intersection(names) or any(t in text for t in OUT_OF_MEMORY_TEXTS):
        name = "StageOutOfMemory"
        where = "host" if names[0] == "MemoryError" else "device"
        message = f"phase {stage} ran out of {where} memory: {text or names[0]}"
    else:
        name = "StageFailed"
        message = f"phase {stage} failed: {names[0]}: {text}"
    return Failed(
        error=name, message=message, traceback=_utf8("".join(traceback.format_exception(error)))
    )


def _utf8(text: str) -> str:
    """Text without lone surrogates, which JSON's UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def process_age_s() -> float:
    """Seconds since the kernel started this process, to a clock tick of 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


# ---- the life of a child -------------------------------------------------------------------


def prepare_environment() -> None:
    """Set what the libraries read while they are imported: no network, CUDA call or thread.

    Spawned and forked children get the same, so that they compute the same.
    """
    # Without the NVML-based check, `import diffusers` initialises CUDA, and every fork of
    # this process could never use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # numpy's BLAS starts a thread per core when it is imported; torch has its own BLAS.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # OpenMP's threads wait for each other by spinning, which slows a stage twenty-fold as soon
    # as other work takes a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # pyarrow's allocator would start a thread of its own to give memory back.
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    for name, value in OFFLINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Have the kernel send `signum` when the thread that made this process ends.

    Ends the process with `EXIT_ORPHANED` when the parent is gone already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def arm_lifeline(lifeline_fd: int) -> None:
    """Have this process group killed as soon as nobody holds the lifeline's write end.

    The kernel itself sends SIGKILL, to the whole group: no interpreter lock is needed, so a
    native call of any length is no obstacle, and programs that the stage started go along. A
    thread watches too, for kernels that refuse to signal on a pipe.
    """
    try:
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    except OSError as error:
        print(f"no kernel signal from the lifeline: {error}; a thread watches it", flush=True)
    poller = select.poll()
    poller.register(lifeline_fd, 0)  # POLLHUP comes unasked
    if poller.poll(0):  # armed first, then asked: a close between the two is not missed
        os._exit(EXIT_ORPHANED)

    def watch() -> None:
        poller.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def live(
    stage: str, *, request_fd: int, event_fd: int, lifeline_fd: int, parent_pid: int
) -> NoReturn:
    """Be a stage process: leave the launcher's group, arm the guards, serve, exit.

    Args:
        stage: Names the process in `ps` and `nvidia-smi`.
        request_fd: Read end of the request pipe.
        event_fd: Write end of the event pipe.
        lifeline_fd: Read end of a pipe whose write end the launcher alone holds.
        parent_pid: The process that forked or spawned this one.
    """
    code = EXIT_WORKER_BUG
    try:
        if os.getpgrp() != os.getpid():
            os.setsid()
        for fd in (request_fd, event_fd, lifeline_fd):
            os.set_inheritable(fd, False)  # a program that the stage starts must not hold them
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the launcher decides
        signal.signal(signal.SIGTERM, _on_terminate)
        signal.signal(signal.SIGHUP, _on_parent_death)
        # Not SIGKILL: it would end this process alone and leave behind what it has started.
        die_with_parent(parent_pid, signal.SIGHUP)
        arm_lifeline(lifeline_fd)
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"exeunt:{stage}".encode(), 0, 0, 0)
        faulthandler.enable(all_threads=False)  # a segfault's Python stack reaches the log
        code = serve(request_fd, event_fd)
    except Terminated:
        code = EXIT_TERMINATED
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End this process now: no exit handlers, no interpreter teardown; output is flushed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _on_terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would cut the clean-up
    raise Terminated


def _on_parent_death(_signum: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


def main() -> NoReturn:
    """Be a spawned stage process; the launcher writes this command line."""
    parser = argparse.ArgumentParser(prog="python -m stages.worker")
    parser.add_argument("stage")
    for name in ("request-fd", "event-fd", "lifeline-fd", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    prepare_environment()
    live(**vars(arguments))


if __name__ == "__main__":
    main()

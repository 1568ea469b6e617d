"""Tiny stages that echo, sleep, crash and misbehave on request; no torch.

`EXEUNT_STAGE_HANDLERS=tests.support.fake_stages` puts them in the real ones' place. A request's
option `do` says which behaviour, `value` what to do it with.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import RequestError
from stages.forkserver import preload
from stages.preload import preload_names
from stages.worker import Events

STAGES = ("inspect", "encode", "condition", "denoise", "decode")
HANDLERS = dict.fromkeys(STAGES, "tests.support.fake_stages:run")
ENVIRON = {"EXEUNT_STAGE_HANDLERS": "tests.support.fake_stages"}
LIGHT_PRELOAD = ("json", "tests.support.fake_stages")


def request(do: str, value: Any = None, stage: Any = "encode") -> StageRequest:
    """A request for one of the behaviours below."""
    return StageRequest(
        stage=stage,
        code_version="1",
        family="fake",
        task="test",
        dtype="float32",
        options={"do": do, "value": value},
    )


def context(folder: Path, device: str = "cpu") -> StageContext:
    return StageContext(
        model_dir=str(folder), store_url=str(folder), home_dir=str(folder), device=device
    )


def __getattr__(name: str) -> Any:
    """Attributes that do something to whatever preloads them."""
    if name == "preload_slowly":
        time.sleep(60)
    elif name == "preload_thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif name == "preload_driver_thread":
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        thread.start()
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text("cuda0000140000")
    elif name == "preload_cuda":
        sys.modules["__main__"].is_cuda_initialised = lambda: True  # type: ignore[attr-defined]
    elif name == "preload_exit":
        print("the library is broken", flush=True)
        os._exit(5)
    else:
        raise AttributeError(name)


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    do = request.options["do"]
    report = BEHAVIOURS[str(do)](request.options["value"], events)
    return StageResult(stage=request.stage, artifacts={}), {"answer": report, "pid": os.getpid()}


def _sleep(seconds: Any, events: Events) -> None:
    events.progress("running", message="asleep")
    time.sleep(seconds)


def _stick(value: Any, events: Events) -> None:
    """One call into C that never returns, keeps the interpreter lock and obeys no handler."""
    events.progress("running", message="asleep")
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def _grandchild(path: Any, events: Events) -> None:
    """Start a program that ignores SIGTERM, leave its pid in a file, and wait for it."""
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        Path(path).write_text(str(program.pid))
        events.progress("running", message="asleep")


def _clean_up(path: Any, events: Events) -> None:
    """Hold a temporary file while asleep."""
    Path(path).touch()
    try:
        _sleep(60, events)
    finally:
        Path(path).unlink()


def _facts(names: Any, events: Events) -> dict[str, Any]:
    """What a process is: to compare the two ways of making one."""
    fds = [fd for fd in range(100) if _is_open(fd)]
    return {
        "modules": [name for name in names if name in sys.modules],
        "is_leader": os.getpgrp() == os.getpid() == os.getsid(0),
        "num_fds": len(fds),
        "inheritable": [fd for fd in fds if fd > 2 and os.get_inheritable(fd)],
        "folder": str(Path.cwd()),
        "offline": os.environ["HF_HUB_OFFLINE"],
        "sigint": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _events(values: Any, events: Events) -> None:
    for step in range(1, values + 1):
        events.progress("running", step, values)
    events.warn("half of \x1b[1mit was cut")


def _flood(num_lines: Any, events: Events) -> None:
    for number in range(num_lines):
        print(f"line {number}")


def _last_words(text: Any, events: Events) -> None:
    print("first words")
    print(text, end="")
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(name: Any, events: Events) -> None:
    class OutOfMemoryError(RuntimeError):
        """Stands for torch's, which is known by its name."""

    raise {
        "RequestError": RequestError("height 30 is not a multiple of 16; use 32"),
        "MemoryError": MemoryError(),
        "OutOfMemoryError": OutOfMemoryError("tried to allocate 2 GiB"),
        "KeyError": KeyError("missing"),
        "SystemExit": SystemExit(3),
        "surrogate": ValueError("bad \ud800 and \x1b[31mred"),
    }[name]


BEHAVIOURS: dict[str, Callable[[Any, Events], Any]] = {
    "echo": lambda value, events: value,
    "sleep": _sleep,
    "stick": _stick,
    "grandchild": _grandchild,
    "clean_up": _clean_up,
    "facts": _facts,
    "events": _events,
    "print": lambda value, events: print(value, end=""),
    "flood": _flood,
    "last_words": _last_words,
    "raise": _raise,
    "segfault": lambda value, events: ctypes.string_at(0),
    "signal": lambda value, events: os.kill(os.getpid(), value),
    "exit": lambda value, events: os._exit(value),
    "unserializable": lambda value, events: object(),
    "import": lambda value, events: preload(preload_names("z-image")),
    "random": lambda value, events: random.random(),
}

"""The real stages, and rows that are poison to denoise: their prompt says in which way.

`EXEUNT_STAGE_HANDLERS=tests.support.poison` puts them in the real ones' place.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import HANDLERS as REAL
from stages.worker import Events

HANDLERS = REAL | {"denoise": "tests.support.poison:denoise"}
ENVIRON = {"EXEUNT_STAGE_HANDLERS": "tests.support.poison"}

KILLS, KILLS_ONCE, FAILS = "poison that kills", "poison that kills once", "poison that fails"


def denoise(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Denoise, unless the prompt is poison."""
    from stages import denoise

    if FAILS in request.label:
        raise ValueError("this row is poison")
    mark = Path(context.home_dir) / f"killed-{request.digest}"
    if KILLS_ONCE in request.label:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    elif KILLS in request.label:
        os.kill(os.getpid(), signal.SIGKILL)
    return denoise.run(request, context, events)

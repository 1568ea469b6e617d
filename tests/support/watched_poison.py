"""The stages of `tests.support.poison`, which note each request that they begin.

`EXEUNT_STAGE_HANDLERS=tests.support.watched_poison`, and `EXEUNT_TEST_BEGUN` names the file.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import Events
from tests.support.poison import HANDLERS as POISON

HANDLERS = dict.fromkeys(POISON, "tests.support.watched_poison:run")
FILE_VARIABLE = "EXEUNT_TEST_BEGUN"
ENVIRON = {"EXEUNT_STAGE_HANDLERS": "tests.support.watched_poison"}


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Note the request, then run its stage."""
    line = f"{request.stage} {request.digest}\n".encode()
    fd = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)
    module, _, name = POISON[request.stage].partition(":")
    found: tuple[StageResult, dict[str, Any]] = getattr(importlib.import_module(module), name)(
        request, context, events
    )
    return found

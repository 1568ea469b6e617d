"""The real stages on a device that cannot decode a picture whole.

`EXEUNT_STAGE_HANDLERS=tests.support.scarce_memory` puts them in the real ones' place.
"""

from __future__ import annotations

from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import HANDLERS as REAL
from stages.worker import Events

HANDLERS = REAL | {"decode": "tests.support.scarce_memory:decode"}


def decode(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Decode, if it is in tiles."""
    from stages import decode

    if not request.options.get("tiling"):
        import torch

        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
    return decode.run(request, context, events)

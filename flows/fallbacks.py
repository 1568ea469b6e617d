"""What is tried when a stage ran out of memory: the same work in a way that needs less.

Nothing that changes pixels happens under the key of the request that asked for it: decoding in
tiles is a request of its own. Where a stage computes is no part of a key, so the CPU answers the
request itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.contracts import StageContext, StageRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to do a request with less memory.

    Attributes:
        how: Ends a sentence such as `decoding again in tiles`.
        may_be_refused: Whether the stage may answer that the model cannot do this.
    """

    how: str
    request: StageRequest
    context: StageContext
    may_be_refused: bool = False


def ways_with_less_memory(request: StageRequest, context: StageContext) -> Iterator[Way]:
    """What to try, in this order, after `request` ran out of memory."""
    if request.stage != "decode":
        return
    if not request.options.get("tiling"):
        tiled = request.model_copy(update={"options": {**request.options, "tiling": True}})
        yield Way(how="in tiles", request=tiled, context=context, may_be_refused=True)
    if context.device != "cpu":
        on_cpu = context.model_copy(update={"device": "cpu"})
        yield Way(how="on the CPU", request=request, context=on_cpu)

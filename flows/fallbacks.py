"""What is tried when a stage ran out of memory: the same work in a way that needs less.

Nothing that changes pixels happens under the key of the request that asked for it: decoding in
tiles is a request of its own. Where a stage computes is no part of a key, so the CPU answers the
request itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stages.contracts import StageContext, StageRequest, StageResult
from stages.errors import RequestError, StageOutOfMemory


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


def ways_with_less_memory(
    request: StageRequest, context: StageContext, *, may_tile: bool = True
) -> Iterator[Way]:
    """What to try, in this order, after `request` ran out of memory."""
    if request.stage not in ("condition", "decode"):
        return
    if request.stage == "decode" and may_tile and not request.options.get("tiling"):
        tiled = request.model_copy(update={"options": {**request.options, "tiling": True}})
        yield Way(how="in tiles", request=tiled, context=context, may_be_refused=True)
    if context.device != "cpu":
        on_cpu = context.model_copy(update={"device": "cpu"})
        yield Way(how="on the CPU", request=request, context=on_cpu)


class Shortage:
    """A phase's shortage of memory: what ran out, and what is done about it.

    Args:
        run: Runs a request, or finds its result.
        warn: Tells the user.
        may_tile: Whether tiles are among the ways.
    """

    def __init__(
        self,
        run: Callable[[StageRequest, StageContext], StageResult],
        warn: Callable[[str], None],
        *,
        may_tile: bool = True,
    ) -> None:
        self._run, self._warn, self._may_tile = run, warn, may_tile
        self._least_bytes: int | None = None
        self._error = StageOutOfMemory("")

    def is_expected(self, request: StageRequest) -> bool:
        """Whether a request with inputs no larger than this one's ran out of memory before."""
        return self._least_bytes is not None and _inputs_bytes(request) >= self._least_bytes

    def run_with_less(
        self,
        request: StageRequest,
        context: StageContext,
        error: StageOutOfMemory | None = None,
    ) -> StageResult:
        """Do a request in a way that needs less memory.

        Args:
            error: How it ran out of memory; None if it was not tried, but is expected to.

        Raises:
            StageError: The last way's.
        """
        last: StageOutOfMemory | RequestError = error or self._error
        if error is not None:
            nbytes = _inputs_bytes(request)
            self._least_bytes = min(nbytes, self._least_bytes or nbytes)
            self._error = error
        tried: list[str] = []
        for way in ways_with_less_memory(request, context, may_tile=self._may_tile):
            if error is not None:  # once for each size is enough: a table may have many rows
                self._warn(f"{last}; {request.stage} is tried again {way.how}")
            tried.append(f"{request.stage} on {context.device} failed: {last}; tried {way.how}")
            told = way.context.model_copy(update={"fallbacks": tuple(tried)})
            try:
                return self._run(way.request, told)
            except StageOutOfMemory as next_error:
                last = next_error
            except RequestError as next_error:
                if not way.may_be_refused:
                    raise
                last = next_error
        raise last


def _inputs_bytes(request: StageRequest) -> int:
    return sum(ref.size for ref in request.inputs.values())

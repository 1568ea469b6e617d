"""What a batch changes while it runs a family's flow for one row; without a batch, nothing.

A flow asks here for its model, its run, its phases and where its file goes. So every family's
flow runs in a batch as it stands, and a row's requests, and with them its cache keys, are those
of the family's own command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from flows.phase import Phase
    from flows.run import Run
    from stages.contracts import StageName
    from stages.media import Settings
    from stages.saving import SaveAs

T = TypeVar("T")


class RowScope(Protocol):
    """A batch at work on one row."""

    def run(self, arguments: Mapping[str, Any], make: Callable[..., Run]) -> Run:
        """The run that serves this row; equal arguments share one."""
        ...

    def phase(self, run: Run, stage: StageName) -> Phase:
        """What the flow calls for each request of a phase; its process serves all rows.

        Raises:
            RowPaused: The phase's turn is later.
        """
        ...

    def save(self, content: bytes, save_as: SaveAs, settings: Settings, *, embed: bool) -> Path:
        """Write the row's picture or video under the row's own name.

        Args:
            save_as: Its format, and what it is labelled with.
            settings: How it was made; into the file if `embed`.
        """
        ...


class RowPaused(BaseException):
    """The row has come to a phase whose turn is later; it starts again then, and recalls.

    Not an `Exception`: a flow must not take it for an error.
    """

    def __init__(self, stage: StageName) -> None:
        super().__init__(stage)
        self.stage = stage


_scope: ContextVar[RowScope | None] = ContextVar("exeunt_row_scope", default=None)
_memory: ContextVar[dict[str, Any] | None] = ContextVar("exeunt_batch_memory", default=None)


def current_scope() -> RowScope | None:
    """The batch around this call, if there is one."""
    return _scope.get()


@contextmanager
def in_scope(scope: RowScope) -> Iterator[None]:
    """While open, flows of this context run as rows of a batch."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def remembering() -> Iterator[None]:
    """While open, what `remembered` makes is made once: an opened model serves all rows."""
    if _memory.get() is not None:
        yield
        return
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def remembered(key: str, make: Callable[[], T]) -> T:
    """What `make` gives; within `remembering` it is made once.

    Args:
        key: Names the thing among all that are remembered.
    """
    memory = _memory.get()
    if memory is None:
        return make()
    if key not in memory:
        memory[key] = make()
    return cast(T, memory[key])

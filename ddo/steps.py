"""One step of a module, run again when the device runs out of memory or a weight is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from ddo.errors import DdoError
from ddo.strays import StrayFinder

Smaller = TypeVar("Smaller")


class Boundaries(Protocol[Smaller]):
    """What a session does between and around steps."""

    def begin_step(self) -> None:
        """A step begins in this thread; others may be running."""
        ...

    def end_step(self, *, is_complete: bool) -> None:
        """The step has ended, by an error if it is not complete."""
        ...

    def find_smaller(self, num_tries: int) -> Smaller | None:
        """A plan that holds less of the device; None if there is none. Changes nothing.

        Args:
            num_tries: How often this step has been made smaller already.
        """
        ...

    def make_smaller(self, smaller: Smaller) -> None:
        """Put that plan into effect."""
        ...

    def was_stale(self) -> bool:
        """Whether the step that ended or failed last must be run again, with the module of now."""
        ...

    def stray_finder(self) -> StrayFinder | None:
        """A way to repeat a step that failed; None where weights are never out of reach."""
        ...

    def keep_strays(self, found: set[int]) -> None:
        """Blocks that are used outside of their own layer."""
        ...


class Steps:
    """Runs the outermost entries into a module as steps."""

    def __init__(self, boundaries: Boundaries[Any], max_retries: int) -> None:
        self._boundaries = boundaries
        self._max_retries = max_retries
        self._state = threading.local()

    def run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module: a step, unless one is running in this thread.

        Raises:
            torch.OutOfMemoryError: It does not fit, whatever weights are given back.
        """
        if getattr(self._state, "is_inside", False):
            return method(*args, **kwargs)
        result = self._run_in_memory(method, args, kwargs)
        if self._boundaries.was_stale():
            del result
            result = self._run_in_memory(method, args, kwargs)
        return result

    def _run_in_memory(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step, and again with fewer weights on the device while its memory is short."""
        for retry in range(self._max_retries + 1):
            try:
                return self._run_once(method, args, kwargs)
            except torch.OutOfMemoryError as error:
                is_last = retry == self._max_retries
                smaller = None if is_last else self._boundaries.find_smaller(retry)
                if smaller is None:
                    error.add_note(
                        "weights were offloaded meanwhile; lower device_budget or raise reserve"
                    )
                    raise
            # Here, not above: until the handler ends, its traceback keeps the failed step's
            # tensors alive, and the memory that is wanted is theirs.
            self._boundaries.make_smaller(smaller)
        raise AssertionError("the last retry returns or raises")

    def _run_once(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            with _Step(self._boundaries, self._state):
                return method(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if self._boundaries.was_stale():
                return self._run_once(method, args, kwargs)
            if isinstance(error, DdoError):
                raise
            finder = self._boundaries.stray_finder()
            if finder is None:
                raise
            return self._repeat(finder, error, method, args, kwargs)

    def _repeat(
        self,
        finder: StrayFinder,
        error: RuntimeError,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Repeat a failed step, lending weights that are used outside of their own layer."""
        try:
            with _Step(self._boundaries, self._state), finder:
                result = method(*args, **kwargs)
        except Exception as again:
            error.add_note(f"repeated with weights lent: {type(again).__name__}: {again}")
            raise error from None
        if not finder.found:
            raise error  # something else was wrong, and may be again
        self._boundaries.keep_strays(finder.found)
        return self.run(method, args, kwargs) if finder.ran_uncompiled else result


class _Step:
    def __init__(self, boundaries: Boundaries[Any], state: threading.local) -> None:
        self._boundaries = boundaries
        self._state = state

    def __enter__(self) -> None:
        self._boundaries.begin_step()
        self._state.is_inside = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state.is_inside = False
        self._boundaries.end_step(is_complete=error is None)

"""What can go wrong in a stage, as types: each tells the flow whether a retry can help."""

from __future__ import annotations


class StageError(Exception):
    """Root of everything that a stage or its launcher raises on purpose.

    Each class takes one message, so that it survives a process border and a JSON serializer.
    """

    retryable = False


class RequestError(StageError, ValueError):
    """The user asked for something that cannot be done; found before any model loads."""


class ModelError(StageError, ValueError):
    """A model directory is missing, incomplete, damaged or of the wrong kind."""


class ArtifactError(StageError, RuntimeError):
    """An artifact cannot be written, or does not hold what it should."""


class ArtifactMissing(ArtifactError, LookupError):
    """A referenced artifact is absent or damaged: whatever made it has to run again."""


class StageFailed(StageError, RuntimeError):
    """The stage ran and failed: the same request fails again."""


class BorderError(StageFailed):
    """A tensor at a stage border is not finite, constant, or of the wrong shape or dtype."""


class StageCrashed(StageError, RuntimeError):
    """The stage process died without an answer: killed, segfault, out of host memory."""

    retryable = True


class StageTimeout(StageError, TimeoutError):
    """The stage did not answer in time and was killed."""

    retryable = True


class StageOutOfMemory(StageError, MemoryError):
    """The device had not enough memory for this stage."""


class StageCancelled(StageError, RuntimeError):
    """The session was closed while a request was waiting."""


class DependencyError(StageError, RuntimeError):
    """A library or a driver that this stage needs is missing or too old."""


def _error_types() -> dict[str, type[StageError]]:
    found: dict[str, type[StageError]] = {}
    todo: list[type[StageError]] = [StageError]
    while todo:
        kind = todo.pop()
        found[kind.__name__] = kind
        todo.extend(kind.__subclasses__())
    return found


ERROR_TYPES = _error_types()
"""Every class of this module by its name, to rebuild an error on the other side of a pipe."""

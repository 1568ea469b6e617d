"""What is wrong with a batch as a whole."""

from stages.errors import RequestError, StageFailed


class TableError(RequestError):
    """The table as a whole cannot be used."""


class BatchStopped(StageFailed):
    """More rows have failed than the batch was told to bear."""

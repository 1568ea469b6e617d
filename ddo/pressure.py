"""How a session that had to give memory back tries to get it again. Counting only."""

from __future__ import annotations

_FIRST_WAIT = 16  # steps without want of memory before the first attempt
_LONGER_WAIT = 4  # so many times longer after each attempt


class Pressure:
    """Decides when a smaller budget may grow again, ever more rarely.

    A step that runs out of memory costs about as much as a step, so that an attempt has to be
    paid for by the steps before it.

    Args:
        full_bytes: The budget that the session began with.
    """

    def __init__(self, full_bytes: int) -> None:
        self._full_bytes = full_bytes
        self._num_quiet_steps = 0
        self._wait = _FIRST_WAIT

    def starved(self) -> None:
        """A step ran out of memory."""
        self._num_quiet_steps = 0

    def next_budget(self, now_bytes: int) -> int | None:
        """Called before each step: a larger budget to try now, or None.

        Half of what is missing is asked for at a time.
        """
        if now_bytes >= self._full_bytes:
            return None
        self._num_quiet_steps += 1
        if self._num_quiet_steps <= self._wait:
            return None
        self._num_quiet_steps = 0
        self._wait *= _LONGER_WAIT
        return self._full_bytes - (self._full_bytes - now_bytes) // 2

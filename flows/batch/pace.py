"""How fast a batch goes, and how long it still takes; pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT = 0.02
"""Of the newest row in a stage's mean: the last fifty rows or so count."""


class Pace:
    """Seconds that a row takes in each stage, and what is left of a batch.

    Args:
        num_rows: Rows that are to run.
        forecast_s: Seconds of a row in each stage, from a forecast; measurement takes its place.
    """

    def __init__(self, num_rows: int, forecast_s: Mapping[str, float] | None = None) -> None:
        self.num_rows = num_rows
        self.num_ended = 0
        self._mean_s: dict[str, float] = dict(forecast_s or {})
        self._is_measured: set[str] = set()
        self._num_past: dict[str, int] = {}

    def passes(self, stage: str, elapsed_s: float) -> None:
        """A row has its result of a stage, made or found."""
        self._num_past[stage] = self._num_past.get(stage, 0) + 1
        if stage in self._is_measured:
            self._mean_s[stage] += WEIGHT * (elapsed_s - self._mean_s[stage])
        else:
            self._mean_s[stage] = elapsed_s
            self._is_measured.add(stage)

    def ends(self) -> None:
        """A row is over, done or failed."""
        self.num_ended += 1

    def left_s(self) -> float | None:
        """Seconds that the rest takes; None while nothing is known of some stage.

        Rows that failed before a stage count as if it were still before them, until all ended.
        """
        if self.num_ended >= self.num_rows:
            return 0.0
        if "decode" not in self._mean_s:
            return None
        return sum(
            mean * max(0, self.num_rows - self._num_past.get(stage, 0))
            for stage, mean in self._mean_s.items()
        )


def spoken(seconds: float | None) -> str:
    """A time for people: `45 s`, `12 min`, `3 h 20 min`; empty where there is none."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"

"""Where a batch stands: rows by status, the phase it is in, its rate and what is left."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flows.batch.pace import Pace, spoken
from flows.batch.results import RowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a batch is about to do.

    Attributes:
        num_rows: Rows of the table.
        num_open: Rows that are to run; the others are finished, or bad.
        num_bad: Rows that cannot run.
        forecast_s: Seconds of a row in each stage; empty where nothing is known.
        forecast: What the open rows will take, as a sentence; empty if none is to run.
    """

    num_rows: int
    num_open: int
    num_bad: int
    forecast_s: dict[str, float] = field(default_factory=dict)
    forecast: str = ""


def plan_sentence(plan: Plan) -> str:
    """For people: `1000 rows: 900 to run, 97 finished before, 3 bad`, and what they take."""
    num_done = plan.num_rows - plan.num_open - plan.num_bad
    parts = [f"{plan.num_open} to run"]
    if num_done:
        parts.append(f"{num_done} finished before")
    if plan.num_bad:
        parts.append(f"{plan.num_bad} bad")
    told = f"{plan.num_rows} rows: {', '.join(parts)}"
    return f"{told}; {plan.forecast}" if plan.forecast else told


class Progress:
    """Counts what a batch's display is told.

    Attributes:
        counts: Rows by status.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._pace = Pace(0)
        self._stage, self._num_in_stage, self._num_requests = "", 0, 0
        self._started = time.monotonic()

    def batch_begins(self, plan: Plan) -> None:
        self._pace = Pace(plan.num_open, plan.forecast_s)
        self._started = time.monotonic()

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._stage, self._num_in_stage, self._num_requests = stage, 0, num_requests

    def request_ends(self, stage: str, elapsed_s: float) -> None:
        self._num_in_stage += 1
        self._pace.passes(stage, elapsed_s)

    def row_ends(self, result: RowResult) -> None:
        self.counts[result.status] += 1
        self._pace.ends()

    def state(self) -> dict[str, Any]:
        """Where the batch stands, as plain JSON values."""
        left_s = self._pace.left_s()
        spent_s = time.monotonic() - self._started
        rate = self._pace.num_ended / spent_s if self._pace.num_ended and spent_s else None
        return {
            "stage": self._stage,
            "num_in_stage": self._num_in_stage,
            "num_requests": self._num_requests,
            "num_ended": self._pace.num_ended,
            "num_rows": self._pace.num_rows,
            "num_failed": self.counts["failed"],
            "rows_per_s": None if rate is None else round(rate, 4),
            "left_s": None if left_s is None else round(left_s, 1),
        }

    def share(self) -> float:
        """What of the batch is over, 0 to 1: of its time where that is known, else of its rows."""
        left_s = self._pace.left_s()
        if left_s is not None:
            spent_s = time.monotonic() - self._started
            return spent_s / (spent_s + left_s) if left_s else 1.0
        return self._pace.num_ended / self._pace.num_rows

    def sentence(self) -> str:
        """For people: `denoise 12/500, 40 of 1000 rows, 1.2 rows/s, 14 min left`."""
        state = self.state()
        parts = [f"{self._stage} {self._num_in_stage}/{self._num_requests}"] if self._stage else []
        parts.append(f"{state['num_ended']} of {state['num_rows']} rows")
        if self.counts["failed"]:
            parts.append(f"{self.counts['failed']} failed")
        if (rate := state["rows_per_s"]) is not None:
            parts.append(f"{rate:.2f} rows/s" if rate >= 0.1 else f"{1 / rate:.0f} s a row")
        if state["left_s"] is not None:
            parts.append(f"{spoken(state['left_s'])} left")
        return ", ".join(parts)

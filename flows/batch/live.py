"""A batch on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from flows.batch.pace import spoken
from flows.batch.progress import Plan, Progress, plan_sentence
from flows.batch.results import RowResult
from flows.display import NAME_WIDTH
from stages.rules import escape_for_terminal


class BatchLive:
    """Two bars on a terminal, the batch and its phase, with rate, time left and steps."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console(file=stream, highlight=False)
        self._bars = Bars(
            TextColumn(f"{{task.description:<{NAME_WIDTH}}}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
        )
        self._progress = Progress()
        self._whole = self._bars.add_task("rows", total=None, note="checking")
        self._phase: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While open, the bars are drawn."""
        with self._bars:
            yield

    def checks(self, num_rows: int) -> None:
        self._bars.update(self._whole, completed=num_rows)

    def batch_begins(self, plan: Plan) -> None:
        self._progress.batch_begins(plan)
        self._console.print(plan_sentence(plan), markup=False, soft_wrap=True)
        self._bars.reset(self._whole, total=plan.num_open, note="")

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._progress.phase_begins(stage, num_requests)
        self._phase = self._bars.add_task(stage, total=num_requests, note="")

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        if self._phase is not None:
            note = f"{activity} {step}/{num_steps}" if num_steps else activity
            self._bars.update(self._phase, note=escape_for_terminal(f"{note}  {label}"))

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._progress.request_ends(stage, elapsed_s)
        if self._phase is not None:
            self._bars.update(self._phase, advance=1)
        self._tell_pace()

    def row_ends(self, result: RowResult) -> None:
        self._progress.row_ends(result)
        self._bars.update(self._whole, advance=1)
        self._tell_pace()
        if result.status != "done":
            text = f"row {result.id} {result.status}: {result.error}"
            self._print_warning(text)

    def batch_ends(self) -> None:
        self._bars.update(self._whole, note="")

    def phase_ends(self, stage: str) -> None:
        if self._phase is not None:
            self._bars.remove_task(self._phase)
            self._phase = None

    def saved(self, path: str) -> None:
        pass  # thousands of lines would hide what matters

    def warn(self, message: str) -> None:
        self._print_warning(f"warning: {message}")

    def _tell_pace(self) -> None:
        state = self._progress.state()
        rate, left = state["rows_per_s"], spoken(state["left_s"])
        parts = [f"{rate:.2f} rows/s" if rate else "", f"{left} left" if left else ""]
        if state["num_failed"]:
            parts.append(f"{state['num_failed']} failed")
        self._bars.update(self._whole, note=", ".join(part for part in parts if part))

    def _print_warning(self, text: str) -> None:
        self._console.print(escape_for_terminal(text), style="yellow", markup=False, soft_wrap=True)

"""A batch's page in Prefect: how far it is, its first rows, bad ones first, and their pictures.

It costs the same for ten rows and for ten thousand: three artifacts, brought up to date four times
a minute by a thread of their own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Self

from flows.batch.display import BatchDisplay
from flows.batch.journal import Journal
from flows.batch.progress import Plan, Progress
from flows.batch.results import RowResult
from flows.gallery import MOST_SHOWN, Shown, gallery_markdown, links_of
from flows.progress import ProgressPoster
from flows.settings import RunSettings
from stages.rules import escape_for_terminal

logger = logging.getLogger(__name__)

EVERY_S = 15.0
"""Seconds between two updates; one takes the server some 60 ms."""

SLOW_S = 10.0
"""After an update that took so long, the next one is the last, at the batch's end."""

MOST_LISTED = 200
MOST_BAD = 50
"""Rows that failed or are bad, from anywhere in the table, which are listed first."""


class BatchPage:
    """Hands on what a display is told, and shows it on the batch's page, until it is left.

    Args:
        inner: The display.
        journal: Knows the rows that were finished before.
        settings: Say where pictures can be seen.
        put: Shows something on the page, as `Artifacts.put` does.
    """

    def __init__(
        self,
        inner: BatchDisplay,
        journal: Journal,
        settings: RunSettings,
        put: Callable[[str, str, Any, str], None],
    ) -> None:
        self._inner, self._journal = inner, journal
        self._links = links_of(settings)
        self._put = put
        self._progress, self._has_begun = Progress(), False
        self._rows: dict[str, RowResult] = {}
        self._bad: dict[str, RowResult] = {}
        self._told: tuple[Sequence[RowResult], str] = ([], "")
        self._told_at = time.monotonic()
        self._sending = threading.Lock()
        self._poster = ProgressPoster("batch", send=self._send, interval_s=EVERY_S, slow_s=SLOW_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._poster.close()
        is_cancelled = kind is not None and not issubclass(kind, Exception)
        if is_cancelled or not self._has_begun:
            return
        try:
            self._take_stock()
            self._send(100.0 * self._progress.share(), self._progress.sentence())
        except Exception as error:  # whatever the server says, the files are there
            logger.warning("the batch's page does not show its end: %r", error)

    # ---- what a display is told ------------------------------------------------------------

    def checks(self, num_rows: int) -> None:
        self._inner.checks(num_rows)

    def batch_begins(self, plan: Plan) -> None:
        self._inner.batch_begins(plan)
        self._progress.batch_begins(plan)
        self._has_begun = True
        for result in islice(self._journal.results(), MOST_LISTED):
            self._keep(result)

    def phase_begins(self, stage: str, num_requests: int) -> None:
        self._inner.phase_begins(stage, num_requests)
        self._progress.phase_begins(stage, num_requests)

    def step(self, stage: str, label: str, activity: str, step: int, num_steps: int) -> None:
        self._inner.step(stage, label, activity, step, num_steps)

    def request_ends(self, stage: str, label: str, *, cached: bool, elapsed_s: float) -> None:
        self._inner.request_ends(stage, label, cached=cached, elapsed_s=elapsed_s)
        self._progress.request_ends(stage, elapsed_s)
        self._tell()

    def row_ends(self, result: RowResult) -> None:
        self._inner.row_ends(result)
        self._progress.row_ends(result)
        self._keep(result)
        self._tell()

    def phase_ends(self, stage: str) -> None:
        self._inner.phase_ends(stage)

    def batch_ends(self) -> None:
        self._inner.batch_ends()

    def saved(self, path: str) -> None:
        self._inner.saved(path)

    def warn(self, message: str) -> None:
        self._inner.warn(message)

    # ---- what the page shows ---------------------------------------------------------------

    def _keep(self, result: RowResult) -> None:
        for kept in (self._rows, self._bad):
            kept.pop(result.id, None)
        kept = self._rows if result.status == "done" else self._bad
        if len(kept) < (MOST_LISTED if result.status == "done" else MOST_BAD):
            kept[result.id] = result

    def _tell(self) -> None:
        if time.monotonic() - self._told_at >= EVERY_S:
            self._told_at = time.monotonic()
            self._take_stock()
            self._poster.post(100.0 * self._progress.share(), self._progress.sentence())

    def _take_stock(self) -> None:
        counts = self._journal.counts()
        done = sorted(self._rows.values(), key=lambda each: each.row)
        listed = [*self._bad.values(), *done]
        told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        if len(listed) < sum(counts.values()):
            told += f"; {len(listed)} of them are listed, bad ones first"
        self._told = (listed, told)

    def _send(self, percent: float, sentence: str) -> None:
        rows, counts = self._told
        with self._sending:
            self._put("progress", "progress-batch", round(percent, 1), sentence)
            if rows:
                self._put("table", "rows", json.dumps([_line(row) for row in rows]), counts)
            if self._links is not None and (shown := pictures_of(rows)):
                text = gallery_markdown(shown, self._links)
                first = "the first " if len(shown) == MOST_SHOWN else ""
                self._put("markdown", "gallery", text, f"{first}{len(shown)} pictures")


def pictures_of(rows: Sequence[RowResult]) -> list[Shown]:
    """The files of the first rows that are done."""
    done = [row for row in rows if row.status == "done" and row.picture_sha256]
    return [
        Shown(
            digest=str(row.picture_sha256),
            prompt=row.prompt or "",
            label=row.id,
            is_clip=(row.media_type or "").startswith("video/"),
        )
        for row in done[:MOST_SHOWN]
    ]


def _line(row: RowResult) -> dict[str, Any]:
    return {
        "row": row.row,
        "id": escape_for_terminal(row.id, limit=80),
        "status": row.status,
        "file or error": escape_for_terminal(row.file or row.error or "", limit=200),
        "prompt": escape_for_terminal(row.prompt or "", limit=80),
        "seed": "" if row.seed is None else str(row.seed),
    }


class Artifacts:
    """Artifacts of one flow run, each created at first and brought up to date from then on.

    Args:
        run_id: The flow run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._ids: dict[str, str] = {}
        self._shown: dict[str, dict[str, Any]] = {}

    def put(self, kind: str, key: str, data: Any, description: str) -> None:
        """Show this under a key, unless it is shown already; blocks until the server has it.

        Raises:
            Exception: The server does not answer, or refuses.
        """
        from prefect.client.orchestration import get_client

        shown = {"data": data, "description": description}
        if self._shown.get(key) == shown:
            return
        # Not the client's own methods: they tell the whole content as an event besides, which
        # the server keeps.
        with get_client(sync_client=True) as client:
            if key in self._ids:
                place = {"id": self._ids[key]}
                answer = client.request("PATCH", "/artifacts/{id}", path_params=place, json=shown)
                answer.raise_for_status()
            else:
                new = shown | {"type": kind, "key": key, "flow_run_id": self._run_id}
                answer = client.request("POST", "/artifacts/", json=new)
                self._ids[key] = str(answer.raise_for_status().json()["id"])
        self._shown[key] = shown

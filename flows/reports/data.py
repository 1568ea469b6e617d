"""What a report shows: plain values, no files opened.

Times are seconds, moments seconds since 1970, memory bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OTHER = "other"
"""What of a request's time no host phase took: reading its inputs, starting its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture, clip or sound that was asked for.

    Attributes:
        name: For people: the file's name, or the row's id.
        path: The file, absolute; None if there is none.
        media_type: Such as `image/png`.
        status: `done`, `failed`, or `invalid` for a row that never ran.
        is_cached: Whether every stage found its result.
        elapsed_s: Of the stages that ran for it alone; None if unknown.
        seed: Exact; None if unknown.
        error: Type and reason of a failure.
        settings: All settings, as they stand in the picture.
        parameters: The same as the text that most picture tools read.
    """

    name: str
    path: Path | None
    media_type: str = ""
    status: str = "done"
    is_cached: bool = False
    elapsed_s: float | None = None
    prompt: str = ""
    seed: int | None = None
    row_id: str = ""
    error: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    parameters: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Something that failed: of a request, or of a row.

    Attributes:
        what: The row's id or the request's label.
        stage: The phase; empty if none had begun.
        kind: The error's type.
        reason: Its message.
    """

    what: str
    stage: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A request whose result was in the store."""

    stage: str
    label: str
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTotal:
    """What one phase took in all.

    Attributes:
        num_made: Requests that ran.
        num_found: Requests whose result was in the store.
        seconds: By host phase, in the order in which they run, with `other` last.
        median_s: Of the requests that ran.
        median_step_s: Of the steps; None without steps.
        peaks: Largest value of each kind of memory.
    """

    stage: str
    num_made: int
    num_found: int
    seconds: Mapping[str, float]
    median_s: float | None
    median_step_s: float | None
    peaks: Mapping[str, int]

    @property
    def elapsed_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One kind of memory over time.

    Attributes:
        name: `anonymous_bytes` and the like.
        points: Moment and bytes, in order of time; None where no stage ran.
    """

    name: str
    points: Sequence[tuple[float, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A stretch of time in which one phase's process worked."""

    stage: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One amount, forecast and measured, as texts; `share` is what part of the forecast it was."""

    name: str
    forecast: str
    happened: str
    share: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that a page shows.

    Attributes:
        title: What ran, in a few words.
        state: `finished`, `failed`, or `unfinished` where nobody knows better.
        facts: Name and text, in the order to be shown.
        notes: Warnings and fallbacks, each with how often it was told.
        folder: Where the items lie; a page that is written there links them by name alone.
        forecast: What a batch was forecast to take, beside what it took.
        is_batch: Whether the items are rows of a table.
    """

    title: str
    run_id: str
    state: str
    begin: float | None
    end: float | None
    facts: Mapping[str, str]
    items: Sequence[Item] = ()
    failures: Sequence[Failure] = ()
    warnings: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    totals: Sequence[StageTotal] = ()
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    found: Sequence[Found] = ()
    forecast: Sequence[Compared] = ()
    header: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    is_batch: bool = False

"""The lines that a stage process and its launcher exchange: one JSON document each.

Requests go down one pipe, events come up another; standard output and error are log text
and never carry a result. This module loads no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from stages.contracts import Record, StageContext, StageRequest, StageResult


class Run(Record):
    """Down: do this request; exactly one `Done` or `Failed` answers it."""

    kind: Literal["run"] = "run"
    request: StageRequest
    context: StageContext
    label: str = ""


class Ready(Record):
    """Up, once: the process can take requests.

    Attributes:
        pid: Process id of the stage process.
        elapsed_s: Seconds from the process's start to this event.
    """

    kind: Literal["ready"] = "ready"
    pid: int
    elapsed_s: float


class Progress(Record):
    """Up, often: where the request stands.

    Attributes:
        activity: `waiting`, `loading`, `running` or `writing`.
        step: Finished steps, 0 to `num_steps`.
        num_steps: 0 when the activity has no steps.
        message: A few words, or empty.
    """

    kind: Literal["progress"] = "progress"
    activity: str
    step: int = 0
    num_steps: int = 0
    message: str = ""


class Warn(Record):
    """Up: something the user should read, such as a truncated prompt."""

    kind: Literal["warn"] = "warn"
    message: str


class Done(Record):
    """Up: the request's result, with the report that goes beside it."""

    kind: Literal["done"] = "done"
    result: StageResult
    report: dict[str, Any]


class Failed(Record):
    """Up: the request failed; the process may go on with the next one.

    Attributes:
        error: Class name out of `stages.errors.ERROR_TYPES`.
        message: The error's own text.
        traceback: For the log; never the only place where the reason stands.
    """

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    traceback: str = ""


Event = Annotated[Ready | Progress | Warn | Done | Failed, Field(discriminator="kind")]
EVENTS: TypeAdapter[Ready | Progress | Warn | Done | Failed] = TypeAdapter(Event)

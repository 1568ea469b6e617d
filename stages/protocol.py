"""The lines that a stage process and its launcher exchange: one JSON document each.

Requests go down one pipe, events come up another; standard output and error are log text
and never carry a result. The messages between a launcher and its fork server and the exit
codes of both kinds of process stand here too. This module loads no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from stages.contracts import Record, StageContext, StageRequest, StageResult

PREVIEW = "preview"
"""The activity of a progress event whose message is the path of a picture."""


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
        activity: `waiting`, `loading`, `resumed`, `running`, `preview` or `writing`.
        step: Finished steps, 0 to `num_steps`.
        num_steps: 0 when the activity has no steps.
        message: A few words, or empty; of `preview` the picture's path.
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


# ---- launcher and fork server: one message a packet ----------------------------------------


class Fork(Record):
    """To the fork server, with four descriptors: request, event, log and lifeline."""

    kind: Literal["fork"] = "fork"
    stage: str


class Signal(Record):
    """To the fork server: a signal for a child's process group, unless it is reaped already."""

    kind: Literal["signal"] = "signal"
    pid: int
    signum: int


class Serving(Record):
    """From the fork server, once: its imports are done.

    Attributes:
        elapsed_s: Seconds from the server's start to this message.
    """

    kind: Literal["serving"] = "serving"
    elapsed_s: float


class Forked(Record):
    """From the fork server, one per `Fork` and in their order."""

    kind: Literal["forked"] = "forked"
    pid: int


class Refused(Record):
    """From the fork server in place of `Forked`: a fork would not be safe, and why."""

    kind: Literal["refused"] = "refused"
    reason: str


class Exited(Record):
    """From the fork server: a child is gone, and its process group with it.

    Attributes:
        exit_code: The child's exit code, or minus the signal that ended it.
    """

    kind: Literal["exited"] = "exited"
    pid: int
    exit_code: int


Order = Annotated[Fork | Signal, Field(discriminator="kind")]
ORDERS: TypeAdapter[Fork | Signal] = TypeAdapter(Order)
Notice = Annotated[Serving | Forked | Refused | Exited, Field(discriminator="kind")]
NOTICES: TypeAdapter[Serving | Forked | Refused | Exited] = TypeAdapter(Notice)
MAX_PACKET_BYTES = 65536

# ---- exit codes ----------------------------------------------------------------------------

EXIT_DONE = 0
EXIT_WORKER_BUG = 70
EXIT_BAD_REQUEST = 71
EXIT_EVENTS_CLOSED = 72
EXIT_ORPHANED = 73
EXIT_TERMINATED = 143

EXIT_MEANINGS = {
    EXIT_DONE: "its request pipe was closed",
    EXIT_WORKER_BUG: "an unexpected error outside of any request",
    EXIT_BAD_REQUEST: "a line on its request pipe was no request",
    EXIT_EVENTS_CLOSED: "its event pipe was closed while it answered",
    EXIT_ORPHANED: "its launcher was gone before it had started",
    EXIT_TERMINATED: "it was told to terminate",
}
"""Why a stage process or a fork server ended, by exit code."""

"""A session that hands its process the next request before it is asked for the answer.

Between two requests a flow has much to do that is none of the stage's: Prefect's records, the
journal, the file. Meanwhile the process has the next row to work on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from flows.launch import Launcher
from flows.session import StageSession
from flows.stage_process import Event, StageProcess
from stages.contracts import StageContext, StageRequest
from stages.errors import StageCrashed
from stages.protocol import Done, Failed


class AheadSession(StageSession):
    """A phase's process, with requests that wait in its pipe.

    A process that dies takes them along; they are sent again when `run` asks for them.
    """

    def __init__(
        self,
        stage: str,
        launcher: Launcher,
        timeout_s: float | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        super().__init__(stage, launcher, timeout_s, on_event)
        self._sent: deque[str] = deque()  # digests, in the order of their answers
        self._early: dict[str, Done | Failed] = {}  # answers that nobody has asked for yet

    def send_ahead(self, request: StageRequest, context: StageContext) -> None:
        """Hand a request to the process, which starts if there is none; returns at once.

        `run` with the same request, at any later time, waits for its answer.
        """
        line = self._line(request, context)
        if not self._turn.acquire(blocking=False):
            return
        try:
            process = self._living_process()
            process.send(line)
            self._sent.append(request.digest)
            self._events.extend(process.exchange(0))  # writes what is queued
        except StageCrashed:
            self._discard()  # `run` finds out whether it was this request's fault
        finally:
            self._turn.release()

    def has_ahead(self, request: StageRequest) -> bool:
        """Whether the process has got the request, or has even answered it."""
        return request.digest in self._sent or request.digest in self._early

    @property
    def is_at_work(self) -> bool:
        """Whether the process has any request, or an answer that nobody has asked for."""
        return bool(self._sent or self._early)

    def _living_process(self) -> StageProcess:
        if self._process is not None and self._sent and not self._is_closed:
            return self._process  # if it has died, then of what it was sent, which has to show
        return super()._living_process()

    def rest(self) -> None:
        super().rest()
        if self._process is None:
            self._forget()

    def _discard(self) -> None:
        super()._discard()
        self._forget()

    def _forget(self) -> None:
        self._sent.clear()
        self._early.clear()
        self._events.clear()

    def _answer(self, process: StageProcess, request: StageRequest, line: bytes) -> Done | Failed:
        digest = request.digest
        if (early := self._early.pop(digest, None)) is not None:
            return early
        if digest not in self._sent:
            process.send(line)
            self._sent.append(digest)
        while True:
            first = self._sent[0]
            is_ours = first == digest
            answer = self._next_answer(process, self._tell if is_ours else _ignore)
            self._sent.popleft()
            if is_ours:
                return answer
            self._early[first] = answer


def _ignore(event: Any) -> None:
    """Of a request whose row is not at work: its display is told of steps when it is."""

"""A row on its way through the phases: what it has, what it cost, and what became of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.batch.results import RowResult
from flows.batch.rows import PreparedRow
from stages.contracts import StageName, StageRequest, StageResult
from stages.media import Settings

FIRST_STAGE: StageName = "encode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The finished file of a row.

    Attributes:
        name: Relative to the output folder.
        size: Bytes.
        sha256: Of the file as written.
        media_type: Such as `image/png`.
        settings: How it was made, whether or not they stand in the file.
    """

    name: str
    size: int
    sha256: str
    media_type: str
    settings: Settings


class RowWork:
    """One row at work.

    Its flow starts anew in every phase; what it has asked for before is recalled in order.

    Attributes:
        row: What is to be done.
        waits_for: The stage whose turn it waits for.
        file: The finished file, once there is one.
    """

    def __init__(self, row: PreparedRow) -> None:
        self.row = row
        self.waits_for: StageName = FIRST_STAGE
        self.file: RowFile | None = None
        self._results: list[StageResult] = []
        self._num_recalled = 0
        self._stage: StageName | None = None
        self._has_begun_again = False
        self._warnings: dict[str, None] = {}
        self._requests: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._tries: Counter[str] = Counter()
        self._peaks: dict[str, int] = {}

    # ---- what the flow asks for ------------------------------------------------------------

    def rewind(self) -> None:
        """The row's flow starts from its beginning."""
        self._num_recalled = 0
        self._stage = None

    def begin_again(self) -> bool:
        """Forget all results, because one of their artifacts is gone; False the second time."""
        if self._has_begun_again:
            return False
        self._has_begun_again = True
        self._results.clear()
        self.waits_for = FIRST_STAGE
        return True

    @property
    def is_recalling(self) -> bool:
        """Whether the flow has yet to come to what it had not asked for."""
        return self._num_recalled < len(self._results)

    def recall(self) -> StageResult:
        """The next of the results that the row had."""
        self._num_recalled += 1
        return self._results[self._num_recalled - 1]

    # ---- what it cost ----------------------------------------------------------------------

    def warn(self, message: str) -> bool:
        """Note a warning; whether it is the first time."""
        is_new = message not in self._warnings
        self._warnings[message] = None
        return is_new

    def begins(self, request: StageRequest) -> None:
        """A request of the row is about to be answered."""
        self._stage = request.stage
        self._requests[request.stage] = request.digest

    def is_tried(self, stage: str) -> None:
        """A stage process is about to work for the row."""
        self._tries[stage] += 1

    def is_reported(self, report: Mapping[str, Any]) -> None:
        """A stage process has worked for the row."""
        stage = report["stage"]
        self._requests[stage] = report["request_digest"]  # a fallback is another request
        self._seconds[stage] = self._seconds.get(stage, 0.0) + report["elapsed_s"]
        memory = report["memory"]
        for kind, key in (
            ("host", "peak_rss_bytes"),
            ("device", "device_peak_allocated_bytes"),
        ):
            if key in memory:
                self._peaks[kind] = max(self._peaks.get(kind, 0), memory[key])

    def has(self, result: StageResult) -> None:
        """The row has a result that it had not."""
        self._results.append(result)
        self._num_recalled += 1
        self._stage = None
        for role, ref in result.artifacts.items():
            self._digests[f"{result.stage}.{role}"] = ref.digest

    # ---- what became of it -----------------------------------------------------------------

    def done(self, picture_sha256: str, run_id: str) -> RowResult:
        """The result of a row that has its file."""
        assert self.file is not None, "a flow that ends has saved its file"
        settings = self.file.settings
        return self._result(
            "done",
            run_id,
            file=self.file.name,
            media_type=self.file.media_type,
            file_bytes=self.file.size,
            file_sha256=self.file.sha256,
            picture_sha256=picture_sha256,
            prompt=settings.prompt,
            negative_prompt=settings.negative_prompt,
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
        )

    def failed(self, error: BaseException, run_id: str) -> RowResult:
        """The result of a row that cannot be finished."""
        arguments = self.row.arguments
        names = ("prompt", "negative_prompt", "height", "width")
        return self._result(
            "failed",
            run_id,
            error_type=type(error).__name__,
            error=str(error) or type(error).__name__,
            phase=self._stage,
            **{name: arguments.get(name) for name in names},
            num_inference_steps=arguments.get("num_inference_steps"),
            guidance_scale=arguments.get("guidance_scale"),
        )

    def _result(self, status: Any, run_id: str, **fields: Any) -> RowResult:
        return RowResult(
            id=self.row.id,
            row=self.row.number,
            status=status,
            seed=self.row.seed,
            arguments=json.dumps(dict(self.row.own), default=str, sort_keys=True),
            digests=self._digests,
            requests=self._requests,
            seconds={stage: round(spent, 6) for stage, spent in self._seconds.items()},
            cached=status == "done" and not self._tries,
            peak_host_bytes=self._peaks.get("host"),
            peak_device_bytes=self._peaks.get("device"),
            attempts=max(self._tries.values(), default=1),
            warnings=tuple(self._warnings),
            run_id=run_id,
            **fields,
        )

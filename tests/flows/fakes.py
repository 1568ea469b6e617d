"""A stage session that counts its runs and makes small artifacts, and requests for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef, StageContext, StageRequest, StageResult


def encode_request(prompt: str = "a red fox", **fields: Any) -> StageRequest:
    return StageRequest(
        stage="encode",
        code_version="1",
        family="z-image",
        task="text-to-image",
        components={"text_encoder": "ab" * 32},
        dtype="bfloat16",
        options={"prompt": prompt},
        **fields,
    )


def denoise_request(embeds: ArtifactRef, seed: int = 0) -> StageRequest:
    return StageRequest(
        stage="denoise",
        code_version="1",
        family="z-image",
        task="text-to-image",
        inputs={"embeds": embeds},
        dtype="bfloat16",
        options={"num_inference_steps": 2},
        seed=seed,
    )


def context(store_url: str, home: Path) -> StageContext:
    return StageContext(model_dir="/model", store_url=store_url, home_dir=str(home))


class FakeSession:
    """Stands for a stage process: writes one artifact per request and records the result.

    Args:
        before: Called with the number of this run, 1 for the first, before it does anything;
            raises what the run should raise.
        records: Whether results are recorded in the store, as the real stages do.
        takes_s: How long a run takes.
    """

    def __init__(
        self,
        before: Callable[[int], None] | None = None,
        *,
        records: bool = True,
        takes_s: float = 0.0,
    ) -> None:
        self.ran: list[StageRequest] = []
        self._before = before
        self._records = records
        self._takes_s = takes_s
        self._mutex = threading.Lock()

    def run(self, request: StageRequest, context: StageContext) -> tuple[StageResult, Any]:
        with self._mutex:
            self.ran.append(request)
            number = len(self.ran)
        if self._before is not None:
            self._before(number)
        time.sleep(self._takes_s)
        store = ArtifactStore(context.store_url)
        ref = store.put(b"made of " + request.digest.encode() * 20)
        result = StageResult(stage=request.stage, artifacts={"out": ref})
        if self._records:
            store.record(request, result)
        return result, {"step_s": [0.1]}

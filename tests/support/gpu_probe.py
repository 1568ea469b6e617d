"""A stage handler that does one CUDA computation and says how long after its birth."""

from __future__ import annotations

from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import process_age_s


def run(
    request: StageRequest, context: StageContext, events: Any
) -> tuple[StageResult, dict[str, Any]]:
    """Seconds from the process's start to its first CUDA result, context included."""
    began_s = process_age_s()
    import torch

    value = torch.ones(8, device=context.device).sum().item()
    assert value == 8
    report = {"began_s": began_s, "first_cuda_s": process_age_s()}
    return StageResult(stage=request.stage, artifacts={}), report


HANDLERS = {"denoise": "tests.support.gpu_probe:run"}

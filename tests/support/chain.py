"""The stages as plain functions, called one after the other without any process or flow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.contracts import ArtifactRef, StageContext, StageRequest, StageResult
from stages.worker import handler_for


@dataclass
class Heard:
    """What a stage told while it ran."""

    steps: list[tuple[str, int, int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        self.steps.append((activity, step, num_steps))

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def context(model_dir: Path, root: Path, **changes: Any) -> StageContext:
    """A context on the CPU with its store and home below `root`."""
    fields = {"model_dir": model_dir, "store_url": root / "store", "home_dir": root / "home"}
    return StageContext(**{name: str(value) for name, value in fields.items()}, **changes)


def request(
    stage: str, options: dict[str, Any], *inputs: StageResult, **changes: Any
) -> StageRequest:
    """A request of the Z-Image family whose inputs are the artifacts of `inputs`."""
    roles: dict[str, ArtifactRef] = {}
    for result in inputs:
        roles |= result.artifacts
    fields = {
        "stage": stage,
        "code_version": "1",
        "family": "z-image",
        "task": "text-to-image",
        "dtype": "float32",
        "options": options,
        "inputs": roles,
    }
    return StageRequest.model_validate(fields | changes)


def run_stage(
    stage_request: StageRequest, stage_context: StageContext
) -> tuple[StageResult, dict[str, Any], Heard]:
    """Run one request in this process."""
    heard = Heard()
    handler = handler_for(stage_request.stage)
    result, report = handler(stage_request, stage_context, heard)
    return result, report, heard

"""Runs of the Z-Image flow in a home of their own, with what each one took."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stages.artifacts import ArtifactStore
from stages.stage_report import StageReport

TINY = {"height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 64}


@dataclass
class Painted:
    """What one run of the flow made, and what it took.

    Attributes:
        started: Stage processes started, by stage.
        ran: Requests that a stage process did, by stage.
        num_steps: Denoising steps that were run.
    """

    files: list[Path]
    started: Counter[str]
    ran: Counter[str]
    num_steps: int

    @property
    def pixels(self) -> list[np.ndarray[Any, Any]]:
        return [np.asarray(Image.open(path)) for path in self.files]


class Studio:
    """Runs the flow in a home and an output folder of one test."""

    def __init__(self, model: Path, home: Path, output: Path, launcher: Any) -> None:
        self.model, self.home, self.output, self._launcher = model, home, output, launcher

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.home / "store")

    def paint(self, **arguments: Any) -> Painted:
        from flows.z_image import z_image

        before, reports = Counter(self._launcher.num_processes_started), set(self.reports())
        defaults = {"prompt": "a small red fox", "seed": 7, "model": str(self.model)} | TINY
        pictures = z_image(**defaults | {"output": str(self.output)} | arguments)
        new = [json.loads(path.read_text()) for path in sorted(set(self.reports()) - reports)]
        for report in new:
            StageReport.model_validate(report)  # the schema holds for whatever the stages tell
        return Painted(
            files=[Path(picture.path) for picture in pictures],
            started=Counter(self._launcher.num_processes_started) - before,
            ran=Counter(report["stage"] for report in new),
            num_steps=sum(report["steps"]["num_run"] for report in new),
        )

    def reports(self) -> list[Path]:
        return list((self.home / "reports").rglob("*.json"))

"""Folders of runs as flows leave them: a journal, stage reports, and pictures beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from flows.reports.journal import Journal

RUN_ID = "0badcafe-0000-4000-8000-000000000001"
BEGAN = 1_790_000_000.0


def stage_report(stage: str, *, began: float = BEGAN, **more: Any) -> dict[str, Any]:
    """A stage's report: two host phases, one in the other, and three samples of memory."""
    return {
        "schema": "exeunt.stage-report/1",
        "stage": stage,
        "label": "",
        "request_digest": "0" * 64,
        "run_id": RUN_ID,
        "host": "here",
        "pid": 7,
        "device": "cpu",
        "device_name": "a CPU",
        "dtype": "float32",
        "started_at": began,
        "elapsed_s": 4.0,
        "host_phases": [
            {"name": "inner", "start_s": 0.5, "elapsed_s": 0.5},
            {"name": "load", "start_s": 0.0, "elapsed_s": 1.0},
            {"name": "run", "start_s": 1.0, "elapsed_s": 2.5},
        ],
        "steps": {"num_steps": 0, "num_run": 0, "median_s": None},
        "memory": {"peak_rss_bytes": 900},
        "memory_samples": {"at_s": [0.0, 2.0, 3.5], "anonymous_bytes": [100, 700, 300]},
        "versions": {"exeunt": "0.1.0"},
        "warnings": [],
        "fallbacks": [],
        **more,
    }


class RecordedRun:
    """A run's folder below `reports`, filled line by line.

    Attributes:
        folder: Its journal and reports.
        pictures: Its output folder.
    """

    def __init__(self, root: Path, run_id: str = RUN_ID, **more: Any) -> None:
        self.reports = root / "reports"
        self.folder, self.pictures = self.reports / run_id, root / "pictures"
        self.pictures.mkdir(parents=True, exist_ok=True)
        header = {"run_id": run_id, "family": "z-image", "task": "text-to-image", "model": "tiny"}
        self.journal = Journal(self.folder, header | more, complain=print)
        self._num_reports = 0

    def report(self, document: dict[str, Any]) -> None:
        self._num_reports += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._num_reports:05d}-{document['stage']}.json"
        path.write_text(json.dumps(document))

    def request(self, stage: str, digest: str, *, cached: bool, elapsed_s: float = 1.0) -> None:
        self.journal.write(
            "request",
            stage=stage,
            label="",
            request_digest=f"request of {digest}",
            cached=cached,
            elapsed_s=elapsed_s,
            artifacts={"made": digest},
        )

    def picture(
        self, name: str, prompt: str, *, seed: int = 0, digest: str = "", size: int = 8
    ) -> Path:
        path = self.pictures / name
        Image.new("RGB", (size, size), ((seed * 37) % 256, (seed * 91) % 256, 90)).save(path)
        self.note(path, prompt, seed=seed, digest=digest)
        return path

    def note(self, path: Path, prompt: str, *, seed: int, digest: str) -> None:
        """Put a file that is there into the journal."""
        settings = {"prompt": prompt, "seed": seed, "artifacts": {"decode.image-0": digest}}
        self.journal.write(
            "item",
            path=str(path),
            digest=digest,
            media_type="image/png",
            settings=settings,
            parameters=f"{prompt}\nSteps: 4, Seed: {seed}",
        )
        self.journal.write("saved", path=str(path))

"""A stage's report is what its schema says; the schema in the docs is that of the code.

After a change, write the new schema with
`exeunt report --schema > docs/reference/stage-report.schema.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.contracts import StageContext, StageRequest
from stages.report import RunTracker
from stages.stage_report import StageReport, json_schema

DOCS = Path(__file__).resolve().parents[2] / "docs"


def begun(device: str = "cpu") -> RunTracker:
    request = StageRequest.model_validate(
        {
            "stage": "denoise",
            "code_version": "1",
            "family": "z-image",
            "task": "text-to-image",
            "dtype": "float32",
            "libraries": {},
            "components": {},
            "configs": {},
            "inputs": {},
            "options": {},
            "label": "a fox",
        }
    )
    context = StageContext(model_dir="/m", store_url="file:///s", home_dir="/h", device=device)
    return RunTracker(request, context)


def tracked() -> dict[str, Any]:
    """What a tracker of two steps tells, after its way through JSON."""
    tracker = begun()
    with tracker.host_phase("run"):
        tracker.step(2)
        tracker.step(2)
    document: dict[str, Any] = json.loads(json.dumps(tracker.report()))
    return document


def test_the_schema_in_the_docs_is_that_of_the_code() -> None:
    assert (DOCS / "reference" / "stage-report.schema.json").read_text() == json_schema(), __doc__


def test_a_trackers_report_fits_its_record() -> None:
    report = StageReport.model_validate(tracked())
    assert (report.steps.num_run, report.label) == (2, "a fox")
    assert report.memory.peak_rss_bytes > 0 and len(report.memory_samples.at_s) >= 2


class FakeCuda:
    """Two devices whose counters of peaks go up until they are set back, as torch's do."""

    def __init__(self) -> None:
        self.peaks = {"cuda:0": 0, "cuda:1": 0}

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: str) -> str:
        return f"fake {device}"

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 2**30, 2**31

    def uses(self, device: str, nbytes: int) -> None:
        self.peaks[device] = max(self.peaks[device], nbytes)

    def reset_peak_memory_stats(self, device: str = "cuda:0") -> None:
        self.peaks[device] = 0

    def max_memory_allocated(self, device: str) -> int:
        return self.peaks[device]

    max_memory_reserved = max_memory_allocated


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_requests_peak_is_its_own_whatever_ran_before_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(RunTracker, "_cuda", staticmethod(lambda: cuda))
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # as in a stage process
    found = []
    for nbytes in (500, 9_000, 500):
        tracker = begun(device)
        cuda.uses(device, nbytes)
        found.append(tracker.report()["memory"]["device_peak_allocated_bytes"])
    assert found == [500, 9_000, 500]


def test_the_record_knows_what_it_describes() -> None:
    """Without this, the checks of other tests' reports would show nothing."""
    with pytest.raises(ValidationError, match="surprise"):
        StageReport.model_validate(tracked() | {"surprise": 1})
    with pytest.raises(ValidationError, match="elapsed_s"):
        StageReport.model_validate(tracked() | {"elapsed_s": -1})


def test_the_schema_lets_readers_pass_over_what_a_later_version_adds() -> None:
    schema = json.loads(json_schema())
    assert "false" not in json.dumps(schema.get("additionalProperties", {}))
    assert "additionalProperties" not in schema
    assert {"stage", "request_digest", "memory", "started_at"} <= set(schema["required"])
    assert schema["properties"]["stage"]["enum"][0] == "inspect"

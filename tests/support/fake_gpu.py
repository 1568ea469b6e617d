"""The real stages with a fake device behind `ddo`: models stream on a machine without a GPU.

`EXEUNT_STAGE_HANDLERS=tests.support.fake_gpu` puts them in the real ones' place; they are asked
for device `cpu`, and answer as on a GPU. Every copy and use out of order fails the request.
"""

from __future__ import annotations

from typing import Any

import torch

import native
from ddo.attaching import OpenedDevice
from ddo.backend import NativeBackend
from ddo.settings import OffloadSettings
from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import HANDLERS as REAL
from stages.worker import Events

HANDLERS = REAL | {
    stage: f"tests.support.fake_gpu:{stage}"
    for stage in ("encode", "condition", "denoise", "decode")
}
PAGE = 4 << 10  # small, so that small models do not fit small budgets


class FakeDevices:
    """Fake devices in place of a GPU, one for each component that is attached."""

    def __init__(self) -> None:
        self.drivers: list[native.FakeDriver] = []
        self.limits: list[int] = []

    def open(self, device: str, settings: OffloadSettings) -> OpenedDevice:
        """Stands for `stages.offload.open_device`."""
        driver = native.FakeDriver(granularity=PAGE, seed=len(self.drivers), is_delayed=True)
        limit = settings.device_budget_bytes or 1 << 26
        self.drivers.append(driver)
        self.limits.append(limit)
        backend = NativeBackend(
            driver, torch.device("cpu"), limit_bytes=limit, host_budget_bytes=1 << 26
        )
        return OpenedDevice(backend)

    def violations(self) -> list[str]:
        """What a GPU would have punished."""
        return [text for driver in self.drivers for text in driver.violations()]


def encode(*asked: Any) -> tuple[StageResult, dict[str, Any]]:
    from stages import encode

    return _run(encode.run, *asked)


def condition(*asked: Any) -> tuple[StageResult, dict[str, Any]]:
    from stages import condition

    return _run(condition.run, *asked)


def denoise(*asked: Any) -> tuple[StageResult, dict[str, Any]]:
    from stages import denoise

    return _run(denoise.run, *asked)


def decode(*asked: Any) -> tuple[StageResult, dict[str, Any]]:
    from stages import decode

    return _run(decode.run, *asked)


_DEVICES = FakeDevices()


def _run(
    handler: Any, request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    from stages import offload

    offload.open_device = _DEVICES.open
    offload.is_computed_in_place = lambda _: False
    found: tuple[StageResult, dict[str, Any]] = handler(request, context, events)
    assert _DEVICES.violations() == []
    return found

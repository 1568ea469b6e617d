"""Native objects on a fake or real device, for tests on both sides of the border."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import native

GPU_LIMIT_BYTES = 256 << 20
FAKE_GRANULARITY = 64 << 10


@dataclass
class DeviceRig:
    """One device with an arena, two streams and a weight file of random bytes.

    `page` is the device's granularity; sizes in tests are multiples of it, since it differs
    between devices.
    """

    driver: native.Driver
    path: Path
    file_nbytes: int = 0
    limit_bytes: int = 0
    contents: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.device = native.Device(self.driver)
        self.page = self.device.granularity
        self.limit_bytes = self.limit_bytes or 16 * self.page
        self.file_nbytes = self.file_nbytes or 4 * self.page
        self.contents = os.urandom(self.file_nbytes)
        self.path.write_bytes(self.contents)
        self.arena = native.Arena(
            self.device, limit_bytes=self.limit_bytes, reserve_bytes=8 * self.limit_bytes
        )
        self.host_budget = native.HostBudget(limit_bytes=64 * self.page)
        self.copies = native.Stream(self.device)
        self.compute = native.Stream(self.device)

    def open(self, path: Path | None = None) -> native.HostSource:
        """A source over a file, the rig's own by default; nothing of it is pinned."""
        mapping = native.FileMapping(str(path or self.path))
        return native.HostSource(self.device, self.host_budget, mapping)

    def read(self, address: int, nbytes: int) -> native.Readback:
        """A consumer: what the compute stream sees at an address when its turn comes."""
        readback = native.Readback(self.device, self.host_budget, nbytes)
        readback.enqueue(address, nbytes, self.compute.handle)
        return readback

    def violations(self) -> list[str]:
        """What a fake driver saw and a GPU would punish."""
        return self.driver.violations() if isinstance(self.driver, native.FakeDriver) else []


def fake_driver(seed: int = 0, *, is_delayed: bool = True, **options: bool) -> native.FakeDriver:
    """A fake with small pages, so that tests stay small."""
    return native.FakeDriver(
        granularity=FAKE_GRANULARITY, seed=seed, is_delayed=is_delayed, **options
    )

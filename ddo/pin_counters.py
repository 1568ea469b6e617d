"""What the host's tiers hold, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PinCounters:
    """Bytes by tier, and what was refused.

    Attributes:
        registered_bytes: Pages of weight files that the device reads where they are.
        slab_bytes: Pinned copies of weights.
        ring_bytes: Size of the pinned ring.
        staged_bytes: Weights that go through the pinned ring.
        pageable_bytes: Weights that are copied from pageable memory.
        num_refused: Registrations that the device refused.
        last_status: What the driver said to the last of these.
        num_staging_waits: How often the host waited for reader threads.
    """

    registered_bytes: int = 0
    slab_bytes: int = 0
    ring_bytes: int = 0
    staged_bytes: int = 0
    pageable_bytes: int = 0
    num_refused: int = 0
    last_status: int = 0
    num_staging_waits: int = 0

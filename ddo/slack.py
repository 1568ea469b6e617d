"""Device memory that a session's budget has and its first step has not touched.

Before a step nobody knows how much of the device the module's own work takes, so that a part of
the budget is kept back for it. Afterwards torch holds as much as the step took at most, and what
is still untouched can hold weights. A later step that takes more runs out of memory, gives
weights back and is repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ddo.planning import OffloadPlan
from ddo.sizes import MIB

_LEAST_MARGIN = 64 * MIB
_MARGIN_PART = 64  # part of the budget that stays untouched: torch's blocks differ between steps
_WORTHWHILE = 64 * MIB


@dataclass(frozen=True, slots=True)
class Slack:
    """What was free when the session began.

    Attributes:
        budget_bytes: Device memory for weights, ring and work; None: all that was free.
        free_bytes: Untouched device memory at the beginning.
    """

    budget_bytes: int | None
    free_bytes: int

    def unused_bytes(self, free_bytes: int) -> int:
        """Bytes that can hold weights from now on; 0 if that is not worth a change.

        Args:
            free_bytes: Untouched device memory after a step.
        """
        budget = self.free_bytes if self.budget_bytes is None else self.budget_bytes
        left = min(free_bytes, budget - (self.free_bytes - free_bytes))
        unused = left - max(_LEAST_MARGIN, budget // _MARGIN_PART)
        return unused if unused >= _WORTHWHILE else 0


def choose_promoted(plan: OffloadPlan, nbytes: int) -> Collection[str]:
    """Streamed blocks that become residents when weights get so many bytes more, by name.

    They are spread over the step in proportion to what streams, so that the rhythm of copies
    stays as it was planned.
    """
    if plan.mode != "stream" or nbytes <= 0:
        return ()
    streamed = [block for block in plan.blocks if block.placement == "ring"]
    total = sum(block.nbytes for block in streamed)
    chosen: set[str] = set()
    credit, left = 0.0, nbytes
    for block in streamed:
        credit += nbytes * (block.nbytes / total)
        if credit >= block.nbytes / 2 and block.nbytes <= left:
            chosen.add(block.name)
            credit -= block.nbytes
            left -= block.nbytes
    for block in sorted(streamed, key=lambda block: -block.nbytes):
        if block.name not in chosen and block.nbytes <= left:
            chosen.add(block.name)
            left -= block.nbytes
    return chosen

"""The plan of one session over time: what is known of its module, and when that changes the plan.

Arithmetic only; the session puts the plan into effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddo.blocks import Block
from ddo.planning import BlockSpec, OffloadPlan, PlanError, plan, reorder
from ddo.profile import StepProfile
from ddo.settings import OffloadSettings
from ddo.slack import choose_promoted

BY_ORDER = "order of use"
BY_TIMES = "measured times"

_MAX_CHANGES = 4
_TIMED_STEPS = 2
_WORTHWHILE = 0.95  # a new plan must shorten the predicted step to this share
_FIRST_GIFT = 8  # part of the weights' memory that an exhausted step gives back at first
_LARGEST_GIFT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan to put into effect, and why."""

    plan: OffloadPlan
    reason: str


class Planner:
    """Keeps the order of use, the times and the budget of a session, and plans by them.

    Attributes:
        budget_bytes: What weights and ring may take.
        uses: Blocks in the order of use, repetitions included.
    """

    def __init__(
        self, settings: OffloadSettings, budget_bytes: int, link_bytes_per_s: float
    ) -> None:
        self.budget_bytes = budget_bytes
        self.uses: list[int] = []
        self._settings = settings
        self._link_bytes_per_s = link_bytes_per_s
        self._blocks: Sequence[Block] = ()
        self._order: list[int] = []
        self._times_s: dict[int, float] = {}
        self._compute_s: float | None = None
        self._num_timed = 0
        self._num_changes = 0

    def take(self, blocks: Sequence[Block]) -> None:
        """Start anew with these blocks: the order of definition, no times."""
        self._blocks = blocks
        self._order = list(range(len(blocks)))
        self.uses = list(self._order)
        self._times_s = {}
        self._compute_s = None
        self._num_timed = 0
        self._num_changes = 0

    def make(self, budget_bytes: int | None = None) -> OffloadPlan:
        """The best plan by what is known. Raises PlanError."""
        return plan(
            self._specs(),
            self._settings,
            weight_budget_bytes=self.budget_bytes if budget_bytes is None else budget_bytes,
            link_bytes_per_s=self._link_bytes_per_s,
            compute_s=self._compute_s,
        )

    def smaller(self, held_bytes: int, num_tries: int = 0) -> tuple[int, OffloadPlan] | None:
        """A budget below what is held, and its plan; None when weights cannot take less.

        Args:
            held_bytes: What weights and ring take now.
            num_tries: How often this step has given back already; twice as much each time.
        """
        part = max(_FIRST_GIFT >> num_tries, _LARGEST_GIFT)
        budget = max(0, min(self.budget_bytes, held_bytes) - max(held_bytes // part, 1))
        try:
            return budget, self.make(budget)
        except PlanError:
            return None

    def promote(self, current: OffloadPlan, nbytes: int) -> OffloadPlan | None:
        """The plan with so many bytes more for residents; None if that shortens no step."""
        stays = choose_promoted(current, nbytes)
        if not stays:
            return None
        budget = self.budget_bytes + nbytes
        found = reorder(current, self._specs(), self._settings, stays=stays, budget_bytes=budget)
        return found if (found.step_s or 0.0) < (current.step_s or 0.0) else None

    def learn(
        self, current: OffloadPlan, profile: StepProfile, *, trust_times: bool
    ) -> OffloadPlan | Change:
        """Take in what a step showed.

        Args:
            trust_times: False for the first step of all, which pays for libraries that are
                loaded when they are first called.

        Returns:
            A change, if the order of use was another one or the times promise a shorter step;
            else the current plan with new predictions, which needs no action.
        """
        if self._num_changes >= _MAX_CHANGES:
            return current
        seen = list(dict.fromkeys(profile.order))
        order = [*seen, *(i for i in self._order if i not in set(seen))]
        is_reordered = order != self._order or list(profile.order) != self.uses
        self._order, self.uses = order, list(profile.order)
        if trust_times and profile.compute_s is not None:
            self._take_times(profile.compute_s)
        held = reorder(current, self._specs(), self._settings, compute_s=self._compute_s)
        new = held
        if self._settings.replan and trust_times and self.knows_times:
            with suppress(PlanError):
                new = self.make()
        if new.step_s and held.step_s and new.step_s <= _WORTHWHILE * held.step_s:
            self._num_changes += 1
            return Change(plan=new, reason=BY_TIMES)
        if is_reordered:
            self._num_changes += 1
            return Change(plan=held, reason=BY_ORDER)
        return held

    @property
    def knows_times(self) -> bool:
        """Whether enough steps were timed to plan by their times."""
        return self._num_timed >= _TIMED_STEPS

    def _take_times(self, compute_s: dict[int, float]) -> None:
        """Keep each block's shortest time: a host that paused made the others longer."""
        if self._num_timed:
            compute_s = {i: min(s, self._times_s.get(i, s)) for i, s in compute_s.items()}
        self._num_timed += 1
        self._times_s = compute_s
        self._compute_s = sum(compute_s.values())

    def _specs(self) -> list[BlockSpec]:
        has_times = sum(self._times_s.values()) > 0
        return [
            self._blocks[i].spec(self._times_s.get(i, 0.0) if has_times else None)
            for i in self._order
        ]

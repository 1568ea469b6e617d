"""The plan: what stays on the device, what streams, and what that is predicted to cost.

A pure function of blocks, budgets and rates. It can be made for a machine that is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddo.errors import DdoError
from ddo.loads import Link, Load, Residency, place_uses
from ddo.residency import DoesNotFit, choose_residency, hold_residency
from ddo.settings import OffloadSettings
from ddo.simulate import Use, simulate
from ddo.sizes import show_nbytes

SCHEMA = 1
Mode = Literal["off", "mapped", "resident", "stream", "group"]
Placement = Literal["host", "device", "ring"]

# The choice is made for a link that is slower than measured by this share: a ring that is just
# large enough would stall at each variation of a block's time.
_MARGIN = 0.93


class PlanError(DdoError, ValueError):
    """No plan fits the budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One block of weights in the order of use.

    Attributes:
        name: The module that it belongs to.
        nbytes: Its aligned size on the device.
        compute_weight: Its share of the computation, in any unit; bytes are a fair guess for
            matrix products.
        must_stay: Why it cannot leave the device; empty if it can.
    """

    name: str
    nbytes: int
    compute_weight: float
    must_stay: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Where one block lives.

    Attributes:
        name: As in its specification.
        nbytes: Its aligned size on the device.
        placement: `device` for residents, `ring` for what streams, `host` for what is mapped.
        ring_offset: First byte of its place in the ring; None elsewhere.
        stall_s: How long its computation is predicted to wait in every step.
        reason: Why it is there.
    """

    name: str
    nbytes: int
    placement: Placement
    ring_offset: int | None = None
    stall_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """What a session will do. All amounts are bytes and seconds.

    Attributes:
        mode: `mapped`: computed on the CPU out of mapped files; `resident`: all on the device;
            `stream`: residents and a ring; `group`: diffusers' group offload; `off`: untouched.
        blocks: In the order of use.
        weight_budget_bytes: What weights and ring may take of the device.
        resident_bytes: Blocks that stay on the device.
        streamed_bytes: Bytes copied in every step: `S`.
        ring_bytes: Device bytes of the ring.
        ring_laps: How often a step goes round the ring.
        num_ahead: Streamed blocks that are copied for the next step before this one ends.
        link_bytes_per_s: Rate of the link: `B`.
        compute_s: Time of a step whose weights are all resident: `C`.
        is_compute_measured: False when `compute_s` is an assumption.
        step_s: Predicted time of a step in the steady state.
        bound_s: `max(C, S / B)`, which no plan with these residents undercuts.
        notes: Why the plan is as it is, in sentences.
    """

    mode: Mode
    blocks: tuple[BlockPlan, ...]
    weight_budget_bytes: int | None = None
    resident_bytes: int = 0
    streamed_bytes: int = 0
    ring_bytes: int = 0
    ring_laps: int = 0
    num_ahead: int = 0
    link_bytes_per_s: float | None = None
    compute_s: float | None = None
    is_compute_measured: bool = False
    step_s: float | None = None
    bound_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.ring_bytes

    @property
    def weight_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """A JSON document that names its schema."""
        return {"schema": SCHEMA, **asdict(self), "device_bytes": self.device_bytes}


def unplanned(mode: Mode, specs: Sequence[BlockSpec], note: str) -> OffloadPlan:
    """A plan that places nothing itself."""
    return OffloadPlan(
        mode=mode,
        blocks=tuple(BlockPlan(name=s.name, nbytes=s.nbytes, placement="host") for s in specs),
        notes=(note,),
    )


def plan(
    specs: Sequence[BlockSpec],
    settings: OffloadSettings,
    *,
    weight_budget_bytes: int,
    link_bytes_per_s: float,
    compute_s: float | None = None,
    copy_overhead_s: float = 8e-6,
) -> OffloadPlan:
    """Decide what stays and what streams below a budget for weights and ring.

    Args:
        specs: Blocks in the order of use.
        compute_s: Measured time of a step with all weights resident. None assumes the time
            that the bytes above the budget take on the link, the case with most to gain.

    Raises:
        PlanError: The budget is too small even for the smallest ring, or for `resident`.
    """
    total = sum(spec.nbytes for spec in specs)
    if settings.preset == "off":
        return unplanned("off", specs, "preset off leaves the module alone")
    if settings.preset == "resident" or (
        settings.preset == "auto" and total <= weight_budget_bytes
    ):
        return _resident(specs, settings, weight_budget_bytes, link_bytes_per_s, compute_s)
    assumed_s = max(total - weight_budget_bytes, total // 10) / link_bytes_per_s
    step_compute_s = compute_s if compute_s is not None else assumed_s
    loads = _loads(specs, step_compute_s)
    link = Link(bytes_per_s=link_bytes_per_s * _MARGIN, overhead_s=copy_overhead_s)
    try:
        choice = choose_residency(
            loads,
            link,
            weight_budget_bytes,
            ring_nbytes=settings.ring_bytes,
            keep_few=settings.preset == "low_memory",
        )
    except DoesNotFit as error:
        fixed = sum(s.nbytes for s in specs if s.must_stay)
        ring = f" with a ring of {show_nbytes(settings.ring_bytes)}" if settings.ring_bytes else ""
        raise PlanError(
            f"weights need at least {show_nbytes(error.needed_nbytes)} of the device "
            f"({show_nbytes(fixed)} cannot move){ring}, the budget leaves "
            f"{show_nbytes(weight_budget_bytes)}; raise device_budget or lower reserve"
        ) from error
    exact = Link(bytes_per_s=link_bytes_per_s, overhead_s=copy_overhead_s)
    return _streamed(specs, loads, choice, exact, settings, weight_budget_bytes, compute_s)


def reorder(
    old: OffloadPlan,
    specs: Sequence[BlockSpec],
    settings: OffloadSettings,
    *,
    compute_s: float | None = None,
    stays: Collection[str] = (),
    budget_bytes: int | None = None,
    copy_overhead_s: float = 8e-6,
) -> OffloadPlan:
    """The old plan's residents and ring size for another order of use, or newly measured times.

    Nothing has to be copied for such a change but what the ring holds.

    Args:
        specs: The same blocks in the order of use.
        compute_s: As for `plan`; None keeps the old plan's.
        stays: Streamed blocks that are residents from now on, by name.
        budget_bytes: For weights and ring; None keeps the old plan's.
    """
    assert old.mode == "stream"
    assert old.link_bytes_per_s is not None
    in_ring = {block.name for block in old.blocks if block.placement == "ring"} - set(stays)
    step_compute_s = compute_s if compute_s is not None else old.compute_s
    loads = _loads(specs, step_compute_s or 0.0)
    link = Link(bytes_per_s=old.link_bytes_per_s, overhead_s=copy_overhead_s)
    streamed = [i for i, spec in enumerate(specs) if spec.name in in_ring]
    choice = hold_residency(loads, link, streamed, old.ring_bytes)
    measured_s = (
        compute_s if compute_s is not None or not old.is_compute_measured else (old.compute_s)
    )
    budget = budget_bytes or old.weight_budget_bytes or 0
    return _streamed(specs, loads, choice, link, settings, budget, measured_s)


def _resident(
    specs: Sequence[BlockSpec],
    settings: OffloadSettings,
    budget: int,
    link_bytes_per_s: float,
    compute_s: float | None,
) -> OffloadPlan:
    total = sum(spec.nbytes for spec in specs)
    if total > budget:
        raise PlanError(
            f"preset resident needs {show_nbytes(total)} for weights, the budget leaves "
            f"{show_nbytes(budget)}; raise device_budget, lower reserve or take preset stream"
        )
    return OffloadPlan(
        mode="resident",
        blocks=tuple(
            BlockPlan(name=s.name, nbytes=s.nbytes, placement="device", reason="everything fits")
            for s in specs
        ),
        weight_budget_bytes=budget,
        resident_bytes=total,
        link_bytes_per_s=link_bytes_per_s,
        compute_s=compute_s,
        is_compute_measured=compute_s is not None,
        step_s=compute_s,
        bound_s=compute_s,
        notes=(
            f"preset {settings.preset}: weights of {show_nbytes(total)} fit the "
            f"{show_nbytes(budget)} that the budget leaves them",
        ),
    )


def _loads(specs: Sequence[BlockSpec], compute_s: float) -> list[Load]:
    weight = sum(spec.compute_weight for spec in specs) or 1.0
    return [
        Load(
            nbytes=spec.nbytes,
            compute_s=compute_s * spec.compute_weight / weight,
            is_movable=not spec.must_stay,
        )
        for spec in specs
    ]


def _streamed(
    specs: Sequence[BlockSpec],
    loads: Sequence[Load],
    choice: Residency,
    link: Link,
    settings: OffloadSettings,
    budget: int,
    measured_s: float | None,
) -> OffloadPlan:
    uses = place_uses(loads, link, choice.streamed, choice.ring)
    timeline = simulate(uses)
    streamed = set(choice.streamed)
    moved = sum(load.nbytes for load, c in zip(loads, timeline.copied, strict=True) if c)
    compute_s = measured_s or sum(load.compute_s for load in loads)
    bound_s = max(compute_s, moved / link.bytes_per_s)
    resident = sum(load.nbytes for i, load in enumerate(loads) if i not in streamed)
    blocks = tuple(
        _block(spec, use, stall_s, i in streamed)
        for i, (spec, use, stall_s) in enumerate(zip(specs, uses, timeline.stalls_s, strict=True))
    )
    return OffloadPlan(
        mode="stream",
        blocks=blocks,
        weight_budget_bytes=budget,
        resident_bytes=resident,
        streamed_bytes=moved,
        ring_bytes=choice.ring.nbytes,
        ring_laps=len(choice.ring.laps),
        num_ahead=timeline.num_ahead,
        link_bytes_per_s=link.bytes_per_s,
        compute_s=compute_s,
        is_compute_measured=measured_s is not None,
        step_s=timeline.step_s,
        bound_s=bound_s,
        notes=_notes(choice, settings, budget, moved, timeline.step_s, bound_s, measured_s),
    )


def _block(spec: BlockSpec, use: Use, stall_s: float, is_streamed: bool) -> BlockPlan:
    if is_streamed:
        return BlockPlan(
            name=spec.name,
            nbytes=spec.nbytes,
            placement="ring",
            ring_offset=use.begin,
            stall_s=stall_s,
            reason="streams: its share of the bytes that exceed the budget",
        )
    reason = spec.must_stay or "stays: the ring leaves room for it"
    return BlockPlan(name=spec.name, nbytes=spec.nbytes, placement="device", reason=reason)


def _notes(
    choice: Residency,
    settings: OffloadSettings,
    budget: int,
    moved: int,
    step_s: float,
    bound_s: float,
    measured_s: float | None,
) -> tuple[str, ...]:
    notes = [
        f"preset {settings.preset}: {len(choice.streamed)} blocks stream, "
        f"{show_nbytes(moved)} per step; {show_nbytes(choice.device_nbytes)} of "
        f"{show_nbytes(budget)} are used",
        f"ring of {show_nbytes(choice.ring.nbytes)} in {len(choice.ring.laps)} laps, best of "
        f"{choice.num_simulated} simulated choices",
        f"step is predicted at {step_s / bound_s:.3f} of max(C, S / B)",
    ]
    if measured_s is None:
        notes.append("no step was measured yet: computation is assumed to balance the copies")
    return tuple(notes)

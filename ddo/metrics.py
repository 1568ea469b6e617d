"""Counters of a session, and the report that is made of them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddo.compile_counts import CompileCounts
from ddo.phases import Phases
from ddo.planning import OffloadPlan
from ddo.transfer import Backend, RingCounters

SCHEMA = 1
_KEPT_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Something that was not done in the best way, and why."""

    what: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What a session planned and did. Amounts are bytes and seconds; None: not measured.

    Attributes:
        backend: `torch`, `native`, or `none` where nothing moves.
        device: Such as `cuda:0`.
        plan: The plan in force, as `OffloadPlan.to_json` gives it.
        num_steps: Steps that were completed.
        num_repeated: Steps that ran out of memory and were started again.
        num_replans: Changes of the plan, by reason.
        predicted_step_s: Of the plan in force.
        bound_s: `max(C, S / B)` of the plan in force.
        first_step_s: Time of the first step.
        step_s: Median of the steps that followed the last change of the plan.
        step_clock: `device` when the device's own clock measured, else `host`: then a step's
            time ends when its work was enqueued.
        copied_bytes: Bytes moved to the device since the session began.
        copied_bytes_per_step: Of steps in the steady state.
        rate_bytes_per_s: `copied_bytes_per_step / step_s`.
        stall_s: How long blocks waited for their copies in the last profiled step, by name;
            blocks that did not wait are left out.
        overlap: Share of the copying time that did not lengthen the step: 1 is ideal.
        ring: Counters of all rings.
        num_host_waits: How often the host waited for the device.
        pins: Pinned host memory by tier.
        compiled: What torch compiled in this process since attach: graphs, graph breaks, and
            recompilations among the last 64 compilations.
        setup_s: Seconds of `load` and `attach` by phase, see `ddo.phases`; imports are not in it.
        peak_device_bytes: Most device memory that torch held at a time.
        anonymous_bytes: Anonymous host memory of this process now.
        own_memory_bytes: Weights that no file backs.
        placed_weights: Weights that were on the device before, and were left alone.
        fallbacks: What was not done in the best way.
        schema: Of this record.
    """

    backend: str
    device: str
    plan: dict[str, Any]
    num_steps: int
    num_repeated: int
    num_replans: dict[str, int]
    predicted_step_s: float | None
    bound_s: float | None
    first_step_s: float | None
    step_s: float | None
    step_clock: str
    copied_bytes: int
    copied_bytes_per_step: int | None
    rate_bytes_per_s: float | None
    stall_s: dict[str, float]
    overlap: float | None
    ring: dict[str, int]
    num_host_waits: int
    pins: dict[str, int]
    compiled: dict[str, int]
    setup_s: dict[str, float]
    peak_device_bytes: int | None
    anonymous_bytes: int | None
    own_memory_bytes: int
    placed_weights: int
    fallbacks: tuple[Fallback, ...]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """A JSON document that names its schema."""
        return asdict(self)


@dataclass(slots=True)
class _Step:
    began: Any
    ended: Any
    host_s: float
    copied_bytes: int
    device_s: float | None = None


@dataclass(slots=True)
class Metrics:
    """Adds up what a session does. Guarded by the session's lock."""

    backend: Backend | None = None
    setup: Phases = field(default_factory=Phases)
    compiled: CompileCounts = field(default_factory=CompileCounts)
    num_steps: int = 0
    num_repeated: int = 0
    num_replans: dict[str, int] = field(default_factory=dict)
    retired: RingCounters = field(default_factory=RingCounters)
    uploaded_bytes: int = 0
    stall_s: dict[str, float] = field(default_factory=dict)
    first_step_s: float | None = None
    _fallbacks: dict[tuple[str, str], int] = field(default_factory=dict)
    _pending: deque[_Step] = field(default_factory=deque)
    _steady: deque[_Step] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _started: tuple[float, Any, int] | None = None
    _clock: str = "host"

    def fall_back(self, what: str, reason: str) -> None:
        """Note what was not done in the best way."""
        self._fallbacks[what, reason] = self._fallbacks.get((what, reason), 0) + 1

    def replanned(self, reason: str) -> None:
        """The plan has changed: earlier steps say nothing about it."""
        self.num_replans[reason] = self.num_replans.get(reason, 0) + 1
        self._pending.clear()
        self._steady.clear()

    def retire(self, counters: RingCounters) -> None:
        """Keep the counters of a ring that is given up."""
        for name in RingCounters.__dataclass_fields__:
            setattr(self.retired, name, getattr(self.retired, name) + getattr(counters, name))

    def begin_step(self, copied_bytes: int) -> None:
        """Start the clocks."""
        began = None
        if self.backend is not None:
            began = self.backend.fence(is_timed=True)
            self.backend.record(began)
        self._started = (time.perf_counter(), began, copied_bytes)

    def end_step(self, copied_bytes: int) -> None:
        """Stop the clocks. Nothing waits: the device's time is read later."""
        if self._started is None:
            return
        start, began, copied_before = self._started
        ended = None
        if self.backend is not None:
            ended = self.backend.fence(is_timed=True)
            self.backend.record(ended)
        host_s = time.perf_counter() - start
        self.num_steps += 1
        self._started = None
        self._pending.append(_Step(began, ended, host_s, copied_bytes - copied_before))
        if len(self._pending) > _KEPT_STEPS:
            self._pending.popleft()
        self.harvest()

    def harvest(self) -> None:
        """Read the times of steps that the device has finished."""
        while self._pending:
            step = self._pending[0]
            if step.ended is not None and not step.ended.is_complete():
                return
            self._pending.popleft()
            if self.backend is not None:
                step.device_s = self.backend.elapsed_s(step.began, step.ended)
                self._clock = "host" if step.device_s is None else "device"
            self._steady.append(step)
            if self.first_step_s is None:
                self.first_step_s = _seconds(step)

    def report(
        self,
        plan: OffloadPlan,
        device: str,
        ring: RingCounters | None,
        *,
        own_memory_bytes: int,
        placed_weights: int,
    ) -> OffloadReport:
        """An immutable record of everything so far."""
        self.harvest()
        counters = RingCounters()
        for name in RingCounters.__dataclass_fields__:
            extra = getattr(ring, name) if ring is not None else 0
            setattr(counters, name, getattr(self.retired, name) + extra)
        # The step after a change fills the ring, so that it tells little about the others.
        steady = list(self._steady)[1:] or list(self._steady)
        step_s = statistics.median(map(_seconds, steady)) if steady else None
        per_step = int(statistics.median(s.copied_bytes for s in steady)) if steady else None
        pins = getattr(self.backend, "pins", None)
        return OffloadReport(
            backend=self.backend.name if self.backend is not None else "none",
            device=device,
            plan=plan.to_json(),
            num_steps=self.num_steps,
            num_repeated=self.num_repeated,
            num_replans=dict(self.num_replans),
            predicted_step_s=plan.step_s,
            bound_s=plan.bound_s,
            first_step_s=self.first_step_s,
            step_s=step_s,
            step_clock=self._clock,
            copied_bytes=counters.copied_bytes + self.uploaded_bytes,
            copied_bytes_per_step=per_step,
            rate_bytes_per_s=per_step / step_s if per_step and step_s else None,
            stall_s={name: s for name, s in self.stall_s.items() if s > 0},
            overlap=self._overlap(plan, per_step),
            ring=asdict(counters),
            num_host_waits=self.backend.num_host_waits if self.backend is not None else 0,
            pins=asdict(pins.counters) if pins is not None else {},
            compiled=self.compiled.read(),
            setup_s=dict(self.setup.seconds),
            peak_device_bytes=_peak_device_bytes(self.backend),
            anonymous_bytes=_anonymous_bytes(),
            own_memory_bytes=own_memory_bytes,
            placed_weights=placed_weights,
            fallbacks=tuple(
                Fallback(what=what, reason=reason, count=count)
                for (what, reason), count in self._fallbacks.items()
            ),
        )

    def _overlap(self, plan: OffloadPlan, per_step: int | None) -> float | None:
        if not per_step or not plan.link_bytes_per_s or self._clock != "device":
            return None
        copy_s = per_step / plan.link_bytes_per_s
        return max(0.0, 1.0 - sum(self.stall_s.values()) / copy_s)


def _seconds(step: _Step) -> float:
    return step.host_s if step.device_s is None else step.device_s


def _peak_device_bytes(backend: Backend | None) -> int | None:
    if backend is None or backend.device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_reserved(backend.device))


def _anonymous_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None

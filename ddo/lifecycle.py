"""A session: from a module as it was found, through steps, to the module as it was found."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ddo.adapting import Change, Planner
from ddo.blocks import Block, Inventory, take_inventory
from ddo.buffers import Buffers
from ddo.changes import Changes
from ddo.claims import SessionError, claim, give_up
from ddo.compiled import WHOLE_MODULE
from ddo.hooks import EntryPoints
from ddo.layers import StreamedLayers
from ddo.metrics import Metrics, OffloadReport
from ddo.phases import Phases
from ddo.planning import OffloadPlan, PlanError, unplanned
from ddo.pressure import Pressure
from ddo.profile import Recorder
from ddo.settings import OffloadSettings
from ddo.sizes import show_nbytes
from ddo.slack import Slack
from ddo.steps import Steps
from ddo.strays import StrayFinder
from ddo.structure import keep_replaced
from ddo.transfer import Backend
from ddo.weight_files import WeightFiles

ENTRY_POINTS = ("forward", "encode", "decode")

_PROFILED_STEPS = 3  # the first shows the order, two more the times of that order


class SessionState(enum.Enum):
    """new -> attached -> detached; a session that fails to attach is detached."""

    NEW = "new"
    ATTACHED = "attached"
    DETACHED = "detached"


class OffloadSession:
    """Streams one module's weights between `attach` and `detach`. A context manager.

    Results do not depend on it: weights move as bytes, and every layer computes with all of
    its own. Steps may run in several threads; plans change when none is running.

    Args:
        entry_points: Methods of the module that begin a step.
        hints: Files that the weights may have come from.
        setup: Adds up what attaching takes, after what loading took.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OffloadSettings,
        backend: Backend,
        *,
        entry_points: Sequence[str] = ENTRY_POINTS,
        hints: WeightFiles | None = None,
        setup: Phases | None = None,
    ) -> None:
        self.module = module
        self.settings = settings
        self.state = SessionState.NEW
        self._backend = backend
        self._hints = hints
        self._metrics = Metrics(backend=backend, setup=setup or Phases())
        self._lock = threading.RLock()
        self._steps = Steps(self, settings.max_oom_retries)
        self._num_active = 0
        self._entries = EntryPoints(module, entry_points)
        self._undo = ExitStack()
        self._inventory = Inventory(blocks=[], buffers=[], own_memory_bytes=0, placed=[])
        self._buffers = Buffers()
        self._changes = Changes(module)
        self._planner = Planner(settings, 0, 1.0)  # until the device was asked
        self._pressure = Pressure(0)
        self._plan: OffloadPlan | None = None
        self._layers = StreamedLayers(backend)
        self._profiled: Recorder | None = None  # of a step that the device may not have finished
        self._num_to_profile = 0
        self._must_stay: dict[str, str] = {}
        self._placed_before: set[int] = set()
        self._slack: Slack | None = None  # until the first step has shown what it leaves

    # ---- life ----

    def attach(self) -> OffloadSession:
        """Take the module over. A failure leaves it as it was.

        Raises:
            SessionError: The session is not new, or the module or a part of it is attached.
            PlanError: The budgets are too small.
            NotOwnable: Weights cannot be moved as bytes.
            torch.OutOfMemoryError: The device has less memory than the budget says.
        """
        if self.state is not SessionState.NEW:
            raise SessionError(
                f"session of {type(self.module).__name__} is {self.state.value}, expected new; "
                "attach the module again"
            )
        with ExitStack() as stack:
            stack.callback(setattr, self, "state", SessionState.DETACHED)
            claim(self.module, self)
            stack.callback(give_up, self)
            stack.callback(self._backend.close)
            # A session that is dropped without detaching must not leave pages pinned.
            weakref.finalize(self, self._backend.close).atexit = False
            with self._metrics.setup.phase("measure_link"):
                link = self.settings.link_bytes_per_s or self._backend.measure_link()
            self._planner = Planner(self.settings, self._weight_budget_bytes(), link)
            self._pressure = Pressure(self._planner.budget_bytes)
            if self.settings.preset != "low_memory":
                untouched = self._backend.untouched_bytes()
                self._slack = Slack(self.settings.device_budget_bytes, untouched)
            self._placed_before = {id(p) for p in self.module.parameters() if not p.is_cpu}
            stack.callback(self._release_module)
            self._take_over()
            self._entries.install(
                self._steps.run, self._refuse_moving, self._note_traced, self._edit
            )
            stack.callback(self._entries.remove)
            self._undo = stack.pop_all()
        self._metrics.setup.close()
        self.state = SessionState.ATTACHED
        return self

    def detach(self) -> None:
        """Leave the module as it was found, and give all memory back. Twice is once.

        Blocks the host until the device has finished with the weights.

        Raises:
            SessionError: A step is running in this or another thread.
        """
        with self._lock:
            if self.state is SessionState.ATTACHED:
                if self._num_active:
                    raise SessionError(
                        f"{type(self.module).__name__} is in {self._num_active} steps; let them "
                        "end before detaching"
                    )
                self._undo.close()
            self.state = SessionState.DETACHED

    def __enter__(self) -> OffloadSession:
        return self.attach() if self.state is SessionState.NEW else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.detach()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"detaching failed as well: {second}")

    # ---- what it tells ----

    @property
    def plan(self) -> OffloadPlan:
        """The plan in force."""
        if self._plan is None:
            return unplanned("off", [], "not attached")
        return self._plan

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self._backend.device

    def note(self, what: str, reason: str) -> None:
        """Let the report tell what was not done in the best way."""
        self._metrics.fall_back(what, reason)

    def report(self) -> OffloadReport:
        """What was planned and done so far. Does not wait for the device."""
        with self._lock:
            return self._metrics.report(
                self.plan,
                str(self.device),
                self._layers.counters,
                own_memory_bytes=self._inventory.own_memory_bytes,
                placed_weights=len(self._inventory.placed),
            )

    # ---- taking over, and giving back ----

    def _weight_budget_bytes(self) -> int:
        free = self._backend.free_bytes()
        budget = self.settings.device_budget_bytes
        if budget is not None and budget > free:
            self._metrics.fall_back(
                "device_budget", f"only {show_nbytes(free)} of {show_nbytes(budget)} are free"
            )
        return self.settings.weight_budget_bytes(min(budget or free, free))

    def _take_over(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # whatever mode the step runs in
            self._take_over_plainly()

    def _take_over_plainly(self) -> None:
        phase = self._metrics.setup.phase
        with phase("find_sources"):
            self._inventory = take_inventory(self.module, self._backend.device, self._hints)
        for block in self._inventory.blocks:
            block.must_stay = block.must_stay or self._must_stay.get(block.name, "")
        self._planner.take(self._inventory.blocks)
        self._layers = StreamedLayers(self._backend, self._inventory.blocks, self._metrics)
        self._buffers = Buffers(self._inventory.buffers)
        self._buffers.move(self._backend.device)
        with phase("plan"):
            first = self._planner.make()
        self._enforce(first)
        self._changes.forget(self.module, self._inventory.blocks)
        if self._inventory.own_memory_bytes:
            self._metrics.fall_back(
                "source",
                f"{show_nbytes(self._inventory.own_memory_bytes)} of weights are in memory of "
                "their own, not in mapped files",
            )

    def _release_module(self) -> None:
        keep_replaced(self._inventory.blocks)
        self._layers.clear()
        self._buffers.restore()
        self._changes.close()
        self._bring_adapters_home()
        # What is left of blocks would keep the files mapped; the report needs the counts only.
        self._inventory = replace(self._inventory, blocks=[], buffers=[])
        self._layers = StreamedLayers(self._backend)

    def _bring_adapters_home(self) -> None:
        for parameter in self.module.parameters():
            # Adapters were put beside the weights that they adapt, some of them on the device.
            if parameter.device == self.device and id(parameter) not in self._placed_before:
                parameter.data = parameter.data.to("cpu")

    def _edit(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method that changes weights: all are in host memory meanwhile, none is bound.

        Raises:
            SessionError: A step is running.
        """
        with self._lock:
            if self._num_active:
                raise SessionError(
                    f"{type(self.module).__name__} is in {self._num_active} steps, "
                    f"{getattr(method, '__name__', 'this')} cannot change its weights; let them end"
                )
            self._layers.clear()
            self._bring_adapters_home()
            self._changes.are_certain = True  # the next step takes over what is there then
            return method(*args, **kwargs)

    def _refuse_moving(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise SessionError for `to`, `cuda`, `half` and the like, unless they change nothing."""
        for dtype in {m.dtype for b in self._inventory.blocks for m in b.members}:
            probe = torch.empty(0, dtype=dtype, device=self.device)
            changed = change(probe)
            if (changed.device, changed.dtype) != (probe.device, probe.dtype):
                raise SessionError(
                    f"{type(self.module).__name__} is attached on {self.device}, its weights "
                    f"cannot be changed to {changed.dtype} on {changed.device}; detach it first"
                )

    def _note_traced(self) -> None:
        self._metrics.fall_back(
            "compile", f"code compiled around it ran uncompiled: {WHOLE_MODULE}"
        )

    # ---- plans ----

    def _enforce(self, new: OffloadPlan) -> None:
        """Make the device hold what the plan says, or less if it cannot. No step is active."""
        if keep_replaced(self._inventory.blocks):
            self._changes.are_certain = True  # the blocks still copy what was there before
        while True:
            try:
                self._plan = new
                self._layers.apply(new, self._planner.uses)
                break
            except torch.OutOfMemoryError:
                smaller = self._planner.smaller(new.device_bytes)
                if smaller is None:
                    self._changes.are_certain = (
                        True  # nothing is held now: the next step starts anew
                    )
                    raise
            except BaseException:  # a file that has changed, an interrupt: the same
                self._changes.are_certain = True
                raise
            self._planner.budget_bytes, new = smaller
            self._metrics.fall_back("memory", "the device had less memory than was planned with")
        if new.mode == "resident":
            self._backend.close()  # all copies are done: pinned pages would be lost to others
        self._num_to_profile = _PROFILED_STEPS if new.mode == "stream" else 0
        self._layers.watch(everything=self._num_to_profile > 0)

    # ---- steps ----

    def begin_step(self) -> None:
        """Look at what has changed since the last step, and expect the first block."""
        with self._lock:
            if self._num_active:
                self._num_active += 1
                self._layers.recorder = None  # what it would see are two steps at once
                self._metrics.fall_back("threads", "two threads ran steps at once")
                return
            copied_bytes = self._layers.copied_bytes()
            self._layers.begin_step()  # first of all: the link may have nothing to do until then
            self._changes.before_step()
            if not self._changes.are_certain:
                self._learn()
                self._take_slack()
                self._grow()
            if self._changes.are_certain:
                self._take_over_again()
            self._layers.recorder = None
            if self._num_to_profile and self._profiled is None:
                self._layers.recorder = Recorder(self._backend)
            self._metrics.begin_step(copied_bytes)
            self._num_active = 1

    def end_step(self, *, is_complete: bool) -> None:
        """End what an error or interrupt has kept from ending."""
        with self._lock:
            self._layers.leave_all()
            self._num_active -= 1
            if self._num_active:
                return
            is_complete = not self._changes.after_step() and is_complete
            if is_complete:
                self._metrics.end_step(self._layers.copied_bytes())
                if self._layers.recorder is not None:
                    self._layers.recorder.end()
                    self._profiled = self._layers.recorder
            self._layers.recorder = None

    def was_stale(self) -> bool:
        """Whether the step that has ended, or failed, met a module that was changed before it.

        While steps follow each other closely, this is found out when a step ends: the device
        is at work then. Before the step it would wait for the answer.
        """
        with self._lock:
            return self._changes.was_stale()

    def _take_over_again(self) -> None:
        """Layers, adapters or weights have changed since the last step: look at all anew."""
        self._profiled = None
        keep_replaced(self._inventory.blocks)
        self._layers.clear()
        self._buffers.restore()
        self._changes.close()
        self._take_over()
        self._metrics.replanned("module changed")

    def _learn(self) -> None:
        """Use what a profiled step showed, once the device has finished it."""
        profile = self._profiled.harvest() if self._profiled is not None else None
        if profile is None or self._plan is None:
            return
        self._profiled = None
        self._num_to_profile -= 1
        names = [block.name for block in self._inventory.blocks]
        self._metrics.stall_s = {names[i]: s for i, s in profile.stall_s.items()}
        can_trust = self._metrics.num_steps > 1
        found = self._planner.learn(self._plan, profile, trust_times=can_trust)
        if isinstance(found, Change):
            self._metrics.replanned(found.reason)
            self._enforce(found.plan)
        else:
            self._plan = found
            self._layers.expect(found)
            if self._planner.knows_times or profile.compute_s is None:
                self._num_to_profile = 0
            if not self._num_to_profile:
                self._layers.watch(everything=False)

    def _take_slack(self) -> None:
        """Give weights what of the reserve the first step has left."""
        if self._slack is None or not self._metrics.num_steps or not self.settings.replan:
            return
        unused = self._slack.unused_bytes(self._backend.untouched_bytes())
        self._slack = None
        assert self._plan is not None
        larger = self._planner.promote(self._plan, unused)
        if larger is not None:
            self._planner.budget_bytes += unused
            self._pressure = Pressure(self._planner.budget_bytes)
            self._metrics.replanned("reserve was left")
            self._enforce(larger)

    def _grow(self) -> None:
        """Take back memory that was given up, if no step has wanted it for a while."""
        budget = self._pressure.next_budget(self._planner.budget_bytes)
        if budget is None or not self.settings.replan:
            return
        with suppress(PlanError):
            larger = self._planner.make(budget)
            self._planner.budget_bytes = budget
            self._metrics.replanned("memory was left")
            self._enforce(larger)

    # ---- what goes wrong in a step ----

    def find_smaller(self, num_tries: int) -> tuple[int, OffloadPlan] | None:
        """A smaller budget and its plan."""
        with self._lock:
            if self._num_active or self._plan is None:
                return None
            return self._planner.smaller(self._plan.device_bytes, num_tries)

    def make_smaller(self, smaller: tuple[int, OffloadPlan]) -> None:
        """Give weights back until the plan is met."""
        with self._lock:
            self._planner.budget_bytes = smaller[0]
            self._pressure.starved()
            self._slack = None  # there is none
            self._metrics.num_repeated += 1
            self._metrics.replanned("out of memory")
            self._metrics.fall_back("memory", "a step ran out of device memory and was repeated")
            self._enforce(smaller[1])

    def stray_finder(self) -> StrayFinder | None:
        """On a device, a way to lend it the weights that are bound to the host."""
        if self.device.type == "cpu":
            return None
        return StrayFinder(self._layers.streamed(), self.device)

    def keep_strays(self, found: set[int]) -> None:
        """Let these blocks stay on the device from the next step on."""
        with self._lock:
            for number in found:
                name = self._inventory.blocks[number].name
                self._must_stay[name] = "used outside of its own module's forward"
                self._metrics.fall_back("stays", f"{name} is {self._must_stay[name]}")
            self._changes.are_certain = True


def blocks_of(session: OffloadSession) -> list[Block]:
    """The blocks of an attached session, for tests and tools."""
    return session._inventory.blocks

"""A session: from a module as it was found, through steps, to the module as it was found."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ddo.adapting import Change, Planner
from ddo.blocks import Block, Inventory, take_inventory
from ddo.errors import DdoError
from ddo.hooks import EntryPoints, LayerHooks
from ddo.metrics import Metrics, OffloadReport
from ddo.planning import OffloadPlan, unplanned
from ddo.profile import Recorder
from ddo.settings import OffloadSettings
from ddo.sizes import show_nbytes
from ddo.strays import StrayFinder
from ddo.stream import Streamer
from ddo.structure import Structure, keep_replaced
from ddo.transfer import Backend

ENTRY_POINTS = ("forward", "encode", "decode")

_PROFILED_STEPS = 2  # the first shows the order, the second the times of that order


class SessionError(DdoError, RuntimeError):
    """A session is asked for something that its state forbids."""


class SessionState(enum.Enum):
    """new -> attached -> detached; a session that fails to attach is detached."""

    NEW = "new"
    ATTACHED = "attached"
    DETACHED = "detached"


_sessions: weakref.WeakKeyDictionary[nn.Module, OffloadSession] = weakref.WeakKeyDictionary()
_sessions_lock = threading.Lock()


class OffloadSession:
    """Streams one module's weights between `attach` and `detach`. A context manager.

    Results do not depend on it: weights move as bytes, and every layer computes with all of
    its own. Steps may run in several threads; plans change when none is running.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OffloadSettings,
        backend: Backend,
        *,
        entry_points: Sequence[str] = ENTRY_POINTS,
    ) -> None:
        self.module = module
        self.settings = settings
        self.state = SessionState.NEW
        self._backend = backend
        self._metrics = Metrics(backend=backend)
        self._lock = threading.RLock()
        self._steps = threading.local()
        self._num_active = 0
        self._hooks = LayerHooks(self)
        self._entries = EntryPoints(module, entry_points)
        self._undo = ExitStack()
        self._inventory = Inventory(blocks=[], buffers=[], own_memory_bytes=0, placed=[])
        self._structure = Structure(module)
        self._planner = Planner(settings, 0, 1.0)  # until the device was asked
        self._plan: OffloadPlan | None = None
        self._streamer = Streamer(backend, [], self._metrics)
        self._recorder: Recorder | None = None  # of the step that runs
        self._profiled: Recorder | None = None  # of a step that the device may not have finished
        self._num_to_profile = 0
        self._must_stay: dict[str, str] = {}

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
            _claim(self)
            stack.callback(_unclaim, self)
            stack.callback(self._backend.close)
            self._planner = Planner(
                self.settings,
                self._weight_budget_bytes(),
                self.settings.link_bytes_per_s or self._backend.measure_link(),
            )
            stack.callback(self._release_module)
            self._take_over()
            self._entries.install(self._run, self._refuse_moving)
            stack.callback(self._entries.remove)
            self._undo = stack.pop_all()
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
                self._streamer.counters,
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
        self._inventory = take_inventory(self.module, self._backend.device)
        for block in self._inventory.blocks:
            block.must_stay = block.must_stay or self._must_stay.get(block.name, "")
        self._planner.take(self._inventory.blocks)
        self._streamer = Streamer(self._backend, self._inventory.blocks, self._metrics)
        for module, name, found in self._inventory.buffers:
            if found.device.type == "cpu":
                module._buffers[name] = found.to(self._backend.device, copy=True)
        self._enforce(self._planner.make())
        self._structure = Structure(self.module)
        self._structure.watch(self._inventory.blocks)
        if self._inventory.own_memory_bytes:
            self._metrics.fall_back(
                "source",
                f"{show_nbytes(self._inventory.own_memory_bytes)} of weights are in memory of "
                "their own, not in mapped files",
            )

    def _release_module(self) -> None:
        self._hooks.remove()
        keep_replaced(self._inventory.blocks)
        self._streamer.clear()
        self._restore_buffers()
        self._structure.close()
        self._inventory = Inventory(blocks=[], buffers=[], own_memory_bytes=0, placed=[])
        self._plan = None

    def _restore_buffers(self) -> None:
        """Put the buffers back that were found, with the values that they have now."""
        for module, name, found in self._inventory.buffers:
            now = module._buffers.get(name)
            if now is None or now is found:
                continue
            if now.shape == found.shape and now.dtype == found.dtype:
                if not torch.equal(now.to(found.device), found):
                    found.copy_(now)
                module._buffers[name] = found
            else:
                module._buffers[name] = now.to(found.device)

    def _refuse_moving(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise SessionError for `to`, `cuda`, `half` and the like, unless they change nothing."""
        for dtype in {m.found.dtype for b in self._inventory.blocks for m in b.members}:
            probe = torch.empty(0, dtype=dtype, device=self.device)
            changed = change(probe)
            if (changed.device, changed.dtype) != (probe.device, probe.dtype):
                raise SessionError(
                    f"{type(self.module).__name__} is attached on {self.device}, its weights "
                    f"cannot be changed to {changed.dtype} on {changed.device}; detach it first"
                )

    # ---- plans ----

    def _enforce(self, new: OffloadPlan) -> None:
        """Make the device hold what the plan says. No step is active."""
        self._hooks.remove()
        self._plan = new
        self._streamer.apply(new, self._planner.uses)
        self._num_to_profile = _PROFILED_STEPS if new.mode == "stream" else 0
        self._install_hooks(everywhere=self._num_to_profile > 0)

    def _install_hooks(self, *, everywhere: bool) -> None:
        """Hooks on layers whose blocks stream; on all layers for a step that is profiled."""
        if self._plan is None or self._plan.mode != "stream":
            self._hooks.remove()
            return
        blocks = self._inventory.blocks
        numbers = range(len(blocks)) if everywhere else self._streamer.streamed
        users: dict[nn.Module, list[int]] = {}
        for number in numbers:
            for user in blocks[number].users:
                users.setdefault(user, []).append(number)
        self._hooks.install(list(users.items()))

    # ---- layers, called by the hooks ----

    def reach(self, blocks: Sequence[int]) -> None:
        """Bind the blocks that a layer is about to use."""
        recorder = self._recorder
        streamed = self._streamer.streamed
        for k, number in enumerate(blocks):
            if recorder is not None:
                recorder.reach(number)
            if number in streamed:
                try:
                    self._streamer.use(number)
                except BaseException:
                    self.leave(blocks[:k])
                    raise
                if recorder is not None:
                    recorder.begin()

    def leave(self, blocks: Sequence[int]) -> None:
        """Unbind the blocks that a layer has used."""
        streamed = self._streamer.streamed
        for number in reversed(blocks):
            if number in streamed:
                self._streamer.done(number)

    # ---- steps ----

    def _run(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one step; if the device runs out of memory, give weights back and start again."""
        if getattr(self._steps, "depth", 0):
            return method(*args, **kwargs)
        for retry in range(self.settings.max_oom_retries + 1):
            try:
                return self._run_once(method, args, kwargs)
            except torch.OutOfMemoryError as error:
                smaller = self._smaller_plan() if retry < self.settings.max_oom_retries else None
                if smaller is None:
                    error.add_note(
                        f"offloading held {show_nbytes(self.plan.device_bytes)} of the device for "
                        "weights; lower device_budget or raise reserve"
                    )
                    raise
            # Here, not above: until the handler ends, its traceback keeps the failed step's
            # tensors alive, and the memory that is wanted is theirs.
            self._give_back(smaller)
        raise AssertionError("the last retry returns or raises")

    def _run_once(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            with _Step(self):
                return method(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error, DdoError) or self.device.type == "cpu":
                raise
            return self._find_strays(error, method, args, kwargs)

    def _find_strays(
        self,
        error: RuntimeError,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Repeat a failed step, lending weights that are used outside of their own layer."""
        blocks = self._inventory.blocks
        finder = StrayFinder([(n, blocks[n]) for n in self._streamer.streamed], self.device)
        try:
            with _Step(self), finder:
                result = method(*args, **kwargs)
        except Exception:
            raise error from None
        if not finder.found:
            raise error
        with self._lock:
            for number in finder.found:
                name = blocks[number].name
                self._must_stay[name] = "used outside of its own module's forward"
                self._metrics.fall_back("stays", f"{name} is {self._must_stay[name]}")
            self._structure.forget()  # the next step takes the module over anew
        return result

    def _begin_step(self) -> None:
        with self._lock:
            if self._num_active:
                self._num_active += 1
                self._recorder = None  # what it would see are two steps at once
                self._metrics.fall_back("threads", "two threads ran steps at once")
                return
            if not self._structure.is_same(self.module):
                self._take_over_again()
            self._learn()
            self._recorder = None
            if self._num_to_profile and self._profiled is None:
                self._recorder = Recorder(self._backend)
            self._streamer.begin_step()
            self._metrics.begin_step(self._streamer.copied_bytes())
            self._num_active = 1

    def _end_step(self, *, is_complete: bool) -> None:
        with self._lock:
            self._hooks.leave_all()
            self._num_active -= 1
            if self._num_active:
                return
            if is_complete:
                self._metrics.end_step(self._streamer.copied_bytes())
                if self._recorder is not None:
                    self._recorder.end()
                    self._profiled = self._recorder
            self._recorder = None

    def _take_over_again(self) -> None:
        """Layers, adapters or weights have changed since the last step: look at all anew."""
        self._hooks.remove()
        self._profiled = None
        keep_replaced(self._inventory.blocks)
        self._streamer.clear()
        self._restore_buffers()
        self._structure.close()
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
        found = self._planner.learn(self._plan, profile, trust_times=self._metrics.num_steps > 1)
        if isinstance(found, Change):
            self._metrics.replanned(found.reason)
            self._enforce(found.plan)
        else:
            self._plan = found
            if not self._num_to_profile:
                self._install_hooks(everywhere=False)

    # ---- pressure ----

    def _smaller_plan(self) -> tuple[int, OffloadPlan] | None:
        with self._lock:
            if self._num_active or self._plan is None:
                return None
            return self._planner.smaller(self._plan.device_bytes)

    def _give_back(self, smaller: tuple[int, OffloadPlan]) -> None:
        with self._lock:
            self._planner.budget_bytes = smaller[0]
            self._metrics.num_repeated += 1
            self._metrics.replanned("out of memory")
            self._metrics.fall_back("memory", "a step ran out of device memory and was repeated")
            self._enforce(smaller[1])


class _Step:
    """One outermost entry into the module, in one thread."""

    def __init__(self, session: OffloadSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._begin_step()
        self._session._steps.depth = 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session._steps.depth = 0
        self._session._end_step(is_complete=error is None)


def _claim(session: OffloadSession) -> None:
    """Note that a module and all its parts belong to a session."""
    parts = list(session.module.modules())
    with _sessions_lock:
        for part in parts:
            if part in _sessions:
                raise SessionError(
                    f"{type(part).__name__} is attached already; detach its session first"
                )
        for part in parts:
            _sessions[part] = session


def _unclaim(session: OffloadSession) -> None:
    with _sessions_lock:
        for part in [part for part, owner in _sessions.items() if owner is session]:
            del _sessions[part]


def blocks_of(session: OffloadSession) -> list[Block]:
    """The blocks of an attached session, for tests and tools."""
    return session._inventory.blocks

"""Sessions for modules whose weights are not taken over: nothing moves, all moves, or groups do.

They keep the promise of every session: detached, the module is as it was found.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddo.errors import DdoError
from ddo.inner import give_back
from ddo.metrics import Metrics, OffloadReport
from ddo.phases import Phases
from ddo.planning import BlockSpec, Mode, OffloadPlan, unplanned


class Session(Protocol):
    """A module between `attach` and `detach`. A context manager that detaches."""

    module: nn.Module

    @property
    def plan(self) -> OffloadPlan:
        """The plan in force."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        ...

    def report(self) -> OffloadReport:
        """What was planned and done so far."""
        ...

    def detach(self) -> None:
        """Leave the module as it was found. Twice is once."""
        ...

    def __enter__(self) -> Session: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class GroupError(DdoError, RuntimeError):
    """Group offload is not to be had."""


class RouteSession:
    """A session that moves no weight by itself; also the base of those that let others do it.

    Args:
        reason: Why this route was taken.
        is_fallback: Whether another one was asked for.
    """

    mode: Mode = "mapped"

    def __init__(
        self, module: nn.Module, device: torch.device, reason: str, *, is_fallback: bool = False
    ) -> None:
        self.module = module
        self._device = device
        self._metrics = Metrics()
        self._plan = unplanned(self.mode, _specs(module), reason)
        if is_fallback:
            self._metrics.fall_back(self.mode, reason)
        self._found: list[tuple[Tensor, Tensor]] = []
        self._is_attached = False

    @property
    def plan(self) -> OffloadPlan:
        return self._plan

    @property
    def device(self) -> torch.device:
        return self._device

    def attach(self) -> RouteSession:
        """Let the route begin. A failure leaves the module as it was."""
        self._found = [
            (tensor, tensor.data) for tensor in (*self.module.parameters(), *self.module.buffers())
        ]
        self._is_attached = True
        try:
            self._begin()
        except BaseException:
            self.detach()
            raise
        return self

    def use_setup(self, setup: Phases) -> None:
        """Report these phases as what loading and attaching took."""
        setup.close()
        self._metrics.setup = setup

    def detach(self) -> None:
        if self._is_attached:
            self._is_attached = False
            try:
                self._end()
            finally:
                for tensor, data in self._found:
                    give_back(tensor, data)
                self._found.clear()

    def report(self) -> OffloadReport:
        return self._metrics.report(
            self._plan, str(self._device), None, own_memory_bytes=0, placed_weights=0
        )

    def __enter__(self) -> RouteSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def _begin(self) -> None:
        """What the route does."""

    def _end(self) -> None:
        """What it has to undo beside the weights' data."""


class OffSession(RouteSession):
    """The module is left alone, wherever it is."""

    mode: Mode = "off"


class WholeSession(RouteSession):
    """The whole module is moved to the device by its own `to`."""

    mode: Mode = "resident"

    def _begin(self) -> None:
        self.module.to(self._device)


class GroupSession(RouteSession):
    """Diffusers' group offload, leaf by leaf, for modules that keep their own forward."""

    mode: Mode = "group"

    def _begin(self) -> None:
        self._before = [(child, dict(vars(child))) for child in self.module.modules()]
        try:
            from diffusers.hooks import apply_group_offloading
        except ImportError as error:
            raise GroupError(
                f"group offload of {type(self.module).__name__} needs diffusers: {error}; install "
                "it, or take preset resident"
            ) from error
        apply_group_offloading(
            self.module,
            onload_device=self._device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=self._device.type == "cuda",
            non_blocking=self._device.type == "cuda",
        )

    def _end(self) -> None:
        for child, before in self._before:
            registry: Any = vars(child).get("_diffusers_hook")
            for name in [n for n in getattr(registry, "hooks", {}) if "group_offload" in n]:
                registry.remove_hook(name, recurse=False)
            # The library leaves its registry and a bound method behind.
            for name in ("forward", "_diffusers_hook"):
                if name not in before:
                    vars(child).pop(name, None)


def _specs(module: nn.Module) -> list[BlockSpec]:
    """What a report can say of weights that are not taken over: sizes by layer."""
    return [
        BlockSpec(name=name, nbytes=nbytes, compute_weight=float(nbytes))
        for name, child in module.named_modules()
        if (nbytes := sum(p.nbytes for p in child._parameters.values() if p is not None))
    ]

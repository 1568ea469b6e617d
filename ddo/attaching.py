"""One call that finds the route for a module: streamed, resident, in groups, or left alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ddo.host_memory import pinnable_bytes
from ddo.lifecycle import ENTRY_POINTS, OffloadSession
from ddo.owning import NotOwnable, find_obstacle, why_not_grouped
from ddo.phases import Phases
from ddo.routes import GroupSession, OffSession, RouteSession, Session, WholeSession
from ddo.settings import OffloadSettings
from ddo.source import associate, materialize
from ddo.torch_backend import DeviceError, TorchBackend
from ddo.transfer import Backend
from ddo.weight_files import WeightFiles, read_weight_files


def attach(
    module: nn.Module,
    settings: OffloadSettings | None = None,
    source: str | Path | WeightFiles | None = None,
    *,
    device: str | torch.device | None = None,
    backend: Backend | None = None,
    entry_points: Sequence[str] = ENTRY_POINTS,
) -> Session:
    """Let a module compute on a device that need not hold its weights.

    Call it without gradients and in evaluation mode. Adapters may be loaded and unloaded while
    attached, but weights that are to be fused should be so before.

    Args:
        settings: Completed by the `DDO_*` variables if left out.
        source: The folder or file that holds the weights. A module on `meta` is bound to it; of
            one that has weights it tells where they may have come from.
        device: `cuda` where there is one, else `cpu`.
        backend: In place of the one that `device` means.
        entry_points: Methods of the module that begin a step; those that it lacks are skipped.

    Returns:
        An attached session; leaving its `with` block detaches it.

    Raises:
        DdoError: See `OffloadSession.attach`; the module is as it was.
    """
    setup = Phases()
    files = None
    if source is not None:
        with setup.phase("read_headers"):
            files = source if isinstance(source, WeightFiles) else read_weight_files(source)
        if any(parameter.is_meta for parameter in module.parameters()):
            with setup.phase("associate"):
                materialize(module, files, associate(module, files))
    return attach_loaded(
        module, settings, files, setup, device=device, backend=backend, entry_points=entry_points
    )


def attach_loaded(
    module: nn.Module,
    settings: OffloadSettings | None,
    files: WeightFiles | None,
    setup: Phases,
    *,
    device: str | torch.device | None = None,
    backend: Backend | None = None,
    entry_points: Sequence[str] = ENTRY_POINTS,
) -> Session:
    """As `attach`, for a module that has its weights; `setup` holds what came before."""
    settings = settings or OffloadSettings.from_environment()
    place = _place(device) if backend is None else backend.device
    if route := _other_route(module, settings, place, is_given=backend is not None):
        route.attach()
        route.use_setup(setup)
        return route
    reason: str | None = None
    if backend is None:
        with setup.phase("open_device"):
            opened = open_device(place, settings)
        backend, reason = opened.backend, opened.fallback_reason
    session = OffloadSession(
        module, settings, backend, entry_points=entry_points, hints=files, setup=setup
    )
    if reason is not None:
        session.note("native", reason)
    return session.attach()


def _place(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _other_route(
    module: nn.Module, settings: OffloadSettings, device: torch.device, *, is_given: bool
) -> RouteSession | None:
    """The route of a module that cannot be taken over, or is not to be.

    Args:
        is_given: Whether the caller has chosen the backend.
    """
    if settings.preset == "off":
        return OffSession(module, device, "preset off leaves the module alone")
    if device.type == "cpu" and not is_given:
        where = "the CPU computes with the weights where they are"
        return RouteSession(module, device, where)
    obstacle = find_obstacle(module)
    if obstacle is None:
        if settings.preset == "group":
            if reason := why_not_grouped(module):
                raise NotOwnable(f"{reason}; take preset stream or low_memory")
            return GroupSession(module, device, "preset group")
        return None
    if settings.preset == "resident" and obstacle.may_be_resident:
        return WholeSession(module, device, obstacle.reason, is_fallback=True)
    if not obstacle.may_be_grouped:
        raise NotOwnable(f"{obstacle.reason}; {obstacle.remedy}")
    is_fallback = settings.preset != "group"
    return GroupSession(module, device, obstacle.reason, is_fallback=is_fallback)


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """A device's backend, and why it is not the native one if it is not."""

    backend: Backend
    fallback_reason: str | None = None

    def memory(self) -> AbstractContextManager[None]:
        """While open, what torch allocates in this thread counts against the device's limit.

        Plain torch enforces no limit: there this changes nothing.

        Raises:
            native.StateError: Another such scope is open on the device.
        """
        if self.backend.device.type != "cuda" or isinstance(self.backend, TorchBackend):
            return nullcontext()
        from ddo.backend import NativeBackend, torch_memory

        assert isinstance(self.backend, NativeBackend)
        return torch_memory(self.backend)


def open_device(device: str | torch.device, settings: OffloadSettings) -> OpenedDevice:
    """A CUDA device under the settings' budgets, to be shared by `attach` and torch itself.

    Raises:
        DeviceError: It is no CUDA device, or none is usable.
    """
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"no CUDA device is usable, {place} was asked for; use device cpu")
    if place.type == "cuda":
        torch.empty(1, device=place)  # torch makes the context that everything else shares
    host = pinnable_bytes(settings.host_budget_bytes)
    limit = settings.device_budget_bytes
    if limit is None:
        limit, _ = torch.cuda.mem_get_info(place)
    if reason := why_no_pool(os.environ):
        return OpenedDevice(TorchBackend(place, host), reason)
    try:
        from ddo.backend import open_backend
    except ImportError as error:
        reason = f"the native extension cannot be imported: {error}"
        return OpenedDevice(TorchBackend(place, host), reason)
    opened = open_backend(place, limit_bytes=limit, host_budget_bytes=host)
    return OpenedDevice(opened.backend, opened.fallback_reason)


# Names of the variable from the one that torch reads first, and what in it takes the pool away.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WITHOUT_POOL = ("expandable_segments:true", "backend:cudamallocasync")


def why_no_pool(environment: Mapping[str, str]) -> str | None:
    """Which setting of torch's allocator keeps it from allocating out of a pool of ours."""
    for name in _ALLOCATOR_VARIABLES:
        text = environment.get(name, "")
        plain = "".join(text.split()).lower()
        for setting in _WITHOUT_POOL:
            if setting in plain:
                return (
                    f"{name} is {text!r}: with {setting} torch cannot allocate out of the native "
                    "allocator, so nothing keeps the limit; unset it"
                )
    return None

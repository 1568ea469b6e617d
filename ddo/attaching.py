"""One call that finds the route for a module: streamed, resident, in groups, or left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ddo.blocks import NotOwnable, why_not_ownable
from ddo.host_memory import read_host_memory
from ddo.lifecycle import ENTRY_POINTS, OffloadSession
from ddo.routes import GroupSession, OffSession, RouteSession, Session, WholeSession
from ddo.settings import OffloadSettings
from ddo.source import associate, materialize
from ddo.torch_backend import DeviceError, TorchBackend
from ddo.transfer import Backend
from ddo.weight_files import WeightFiles, read_weight_files

_PINNED_SHARE = 0.6  # of what the host has left: pinned pages are lost to everybody else


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
    settings = settings or OffloadSettings.from_environment()
    files = None
    if source is not None:
        files = source if isinstance(source, WeightFiles) else read_weight_files(source)
        if any(parameter.is_meta for parameter in module.parameters()):
            materialize(module, files, associate(module, files))
    place = _place(device) if backend is None else backend.device
    if settings.preset == "off":
        return OffSession(module, place, "preset off leaves the module alone").attach()
    if backend is None and place.type == "cpu":
        where = "the CPU computes with the weights where they are"
        return RouteSession(module, place, where).attach()
    if route := _other_route(module, settings, place):
        return route.attach()
    reason: str | None = None
    if backend is None:
        backend, reason = _open_backend(place, settings)
    session = OffloadSession(module, settings, backend, entry_points=entry_points, hints=files)
    if reason is not None:
        session.note("native", reason)
    return session.attach()


def _place(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _other_route(
    module: nn.Module, settings: OffloadSettings, device: torch.device
) -> RouteSession | None:
    """The route of a module that cannot be taken over, or is not to be."""
    reason = why_not_ownable(module)
    if reason is None:
        if settings.preset == "group":
            return GroupSession(module, device, "preset group")
        return None
    if "another offloader" in reason:
        raise NotOwnable(f"{reason}; remove them before attaching")
    if settings.preset == "resident":
        return WholeSession(module, device, reason, is_fallback=True)
    if reason.endswith("is compiled"):
        raise NotOwnable(
            f"{reason}, and compiled code holds on to weights that streaming exchanges; take "
            "preset resident, or leave the module uncompiled"
        )
    return GroupSession(module, device, reason, is_fallback=settings.preset != "group")


def _open_backend(device: torch.device, settings: OffloadSettings) -> tuple[Backend, str | None]:
    """The device's backend, and why it is not the native one if it is not."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"no CUDA device is usable, {device} was asked for; use device cpu")
    if device.type == "cuda":
        torch.empty(1, device=device)  # torch makes the context that everything else shares
    host = settings.host_budget_bytes
    if host is None:
        host = int(read_host_memory().available_bytes * _PINNED_SHARE)
    limit = settings.device_budget_bytes
    if limit is None:
        limit, _ = torch.cuda.mem_get_info(device)
    try:
        from ddo.backend import open_backend
    except ImportError as error:
        return TorchBackend(device, host), f"the native extension cannot be imported: {error}"
    opened = open_backend(device, limit_bytes=limit, host_budget_bytes=host)
    return opened.backend, opened.fallback_reason

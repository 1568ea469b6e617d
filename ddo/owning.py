"""Whether a module can be taken over, why not, and what else can be done with it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ddo.compiled import is_region
from ddo.errors import DdoError
from ddo.inner import (
    Obstacle,
    class_name,
    find_obstacle_in,
    is_left_behind_by_groups,
    is_plain,
)


class NotOwnable(DdoError, TypeError):
    """A module's weights cannot be moved as bytes; the message says why."""


def find_obstacle(module: nn.Module) -> Obstacle | None:
    """The first thing that keeps a session from taking a module over; None if nothing does."""
    if is_region(module):
        return Obstacle(
            f"the module ({type(module).__name__}) is compiled as a whole, so that all weights "
            "are in use at once",
            "compile its blocks instead, each by block.compile() or all by "
            "compile_repeated_blocks(), or take preset resident",
        )
    for name, child in module.named_modules():
        where = f"{name or 'the module'} ({type(child).__name__})"
        if _has_offload_hook(child):
            return Obstacle(
                f"{where} has hooks of another offloader",
                "remove them before attaching",
                may_be_resident=False,
            )
        for weight_name, weight in child._parameters.items():
            found = find_obstacle_in(weight) if weight is not None else None
            if found is not None:
                return replace(found, reason=f"{weight_name} of {where} is {found.reason}")
        for buffer_name, buffer in child._buffers.items():
            if buffer is not None and not is_plain(buffer):
                reason = f"{buffer_name} of {where} is a {class_name(buffer)}, more than its bytes"
                return Obstacle(reason, may_be_grouped=True)
    return None


def why_not_grouped(module: nn.Module) -> str | None:
    """Why diffusers' group offload would break a module that can be taken over."""
    for name, child in module.named_modules():
        for weight_name, weight in child._parameters.items():
            if weight is not None and is_left_behind_by_groups(weight):
                return (
                    f"{weight_name} of {name or 'the module'} ({type(child).__name__}) is a "
                    f"{class_name(weight)}, which diffusers' group offload moves in part only"
                )
    return None


def why_not_ownable(module: nn.Module) -> str | None:
    """Why weights cannot be moved as bytes; None if they can."""
    obstacle = find_obstacle(module)
    return None if obstacle is None else obstacle.reason


def _has_offload_hook(child: nn.Module) -> bool:
    if hasattr(child, "_hf_hook"):
        return True
    hooks = getattr(getattr(child, "_diffusers_hook", None), "hooks", {})
    return any("offload" in name for name in hooks)

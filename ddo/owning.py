"""Whether a module can be taken over, and why not."""

from __future__ import annotations

from torch import nn

from ddo.errors import DdoError
from ddo.inner import is_plain, why_more_than_bytes


class NotOwnable(DdoError, TypeError):
    """A module's weights cannot be moved as bytes; the message says why."""


def why_not_ownable(module: nn.Module) -> str | None:
    """Why weights cannot be moved as bytes; None if they can."""
    for name, child in module.named_modules():
        where = f"{name or 'the module'} ({type(child).__name__})"
        if _has_offload_hook(child):
            return f"{where} has hooks of another offloader"
        if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None):
            return f"{where} is compiled"
        for weight_name, weight in child._parameters.items():
            if weight is not None and (reason := why_more_than_bytes(weight)):
                return f"{weight_name} of {where} is {reason}"
        for buffer_name, buffer in child._buffers.items():
            if buffer is not None and not is_plain(buffer):
                kind = type(buffer).__name__
                return f"{buffer_name} of {where} is a {kind}, more than its bytes"
    return None


def _has_offload_hook(child: nn.Module) -> bool:
    if hasattr(child, "_hf_hook"):
        return True
    hooks = getattr(getattr(child, "_diffusers_hook", None), "hooks", {})
    return any("offload" in name for name in hooks)

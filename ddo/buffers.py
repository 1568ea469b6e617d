"""Buffers of an attached module: small, sometimes written by layers, always on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Buffers:
    """Buffers moved to a device until they are put back.

    Args:
        found: `(module, name, data)` of each.
    """

    def __init__(self, found: Sequence[tuple[nn.Module, str, Tensor]] = ()) -> None:
        self._found = list(found)

    def move(self, device: torch.device) -> None:
        """Let the module use copies on the device. Small enough to wait for."""
        for module, name, found in self._found:
            if found.device.type == "cpu":
                module._buffers[name] = found.to(device, copy=True)

    def restore(self) -> None:
        """Put back what was found, with the values that the module has given it meanwhile."""
        for module, name, found in self._found:
            now = module._buffers.get(name)
            if now is None or now is found:
                continue
            if now.shape == found.shape and now.dtype == found.dtype:
                if not torch.equal(now.to(found.device), found):
                    found.copy_(now)
                module._buffers[name] = found
            else:
                module._buffers[name] = now.to(found.device)
        self._found.clear()

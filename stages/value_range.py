"""Weights that a narrow compute dtype cannot hold, found after they were converted."""

from __future__ import annotations

import torch

from stages.errors import ModelError
from stages.model_component import Component

_HELD = ("F16", "F8_E4", "F8_E5", "I", "U", "BOOL")  # nothing that float16 does not reach


def require_in_range(module: torch.nn.Module, part: Component, origin: str) -> None:
    """Refuse weights that became infinite when they were converted to float16.

    bfloat16 and float32 reach 3.4e38, float16 65504. What was infinite would make black pictures.
    Reads each weight of such a file once; files whose dtype float16 holds are not read.

    Args:
        part: The component in its files.
        origin: The model directory, for the message.

    Raises:
        ModelError: Some are infinite; names their number and the first tensor.
    """
    stored = {info.dtype for header in part.headers.values() for info in header.tensors.values()}
    if all(dtype.startswith(_HELD) for dtype in stored):
        return
    found = {
        name: count
        for name, weight in module.named_parameters()
        if weight.dtype == torch.float16 and (count := _num_infinite(weight))
    }
    if found:
        raise ModelError(
            f"component {part.name!r} of {origin} has {sum(found.values())} values in "
            f"{len(found)} tensors, first {next(iter(found))!r}, that float16 cannot hold: it "
            f"reaches {torch.finfo(torch.float16).max:g}; use dtype auto, bfloat16 or float32"
        )


def _num_infinite(weight: torch.Tensor) -> int:
    """How many values are infinite; most weights are read without a copy."""
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or not weight.numel():
        return 0  # packed by a quantizer
    low, high = torch.aminmax(weight.detach())
    if low.isfinite() and high.isfinite():
        return 0
    return int(weight.detach().isinf().sum())

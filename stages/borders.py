"""What may cross a stage border: finite values that are not all one number."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from stages.errors import BorderError

FAINT_CONTRAST = 0.02
"""Share of the full range below which all of a picture looks the same on most screens."""


def check_border(
    stage: str, values: Mapping[str, Any], *, where: str = "", constants: Collection[str] = ()
) -> None:
    """Refuse tensors that cannot be the result of a healthy stage.

    Args:
        stage: Named in the error.
        values: Any nesting of tensors; integer and bool tensors (ids, masks) pass.
        where: Adds a place to the error, such as a step.
        constants: Values of `values` that may be all one number.

    Raises:
        BorderError: A value is NaN or infinite, or a tensor of several values is constant;
            the message holds the tensor, its shape and the counts. Synchronises.
    """
    for name, tensor in _tensors(values, ""):
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        place = f"{stage}: {name} {tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")
        place += f" {where}".rstrip()
        finite = tensor.isfinite()
        if not bool(finite.all()):
            num_nan, num_all = int(tensor.isnan().sum()), tensor.numel()
            num_inf = num_all - int(finite.sum()) - num_nan
            share = 100 * (num_nan + num_inf) / num_all
            raise BorderError(
                f"{place} has {num_nan} NaN and {num_inf} infinite of {num_all} values "
                f"({share:.3g} %); try dtype float32, another attention backend or other weights"
            )
        low, high = (float(item) for item in tensor.aminmax())
        if tensor.numel() > 1 and low == high and name not in constants:
            raise BorderError(
                f"{place} is constant: all {tensor.numel()} values are {low:g}; "
                "the model or its input is broken"
            )


def faint_sentence(name: str, pixels_CHW: torch.Tensor) -> str | None:  # noqa: N803 - its shape
    """A warning about a picture of hardly more than one colour; None when there is more to see.

    Such a picture may be what the prompt asks for, so it is no error.

    Args:
        name: Of the picture.
        pixels_CHW: Values in [0, 1], shape `(C, H, W)`, any float dtype. Synchronises.
    """
    low, high = pixels_CHW.float().flatten(1).aminmax(dim=1)
    contrast = float((high - low).max())
    if contrast >= FAINT_CONTRAST:
        return None
    colour = ", ".join(f"{value * 255:.0f}" for value in ((low + high) / 2).tolist())
    return (
        f"{name} is nearly one colour ({colour} of 255), its contrast is {100 * contrast:.2g} %; "
        "if the prompt asks for more, try dtype float32, another seed or other weights"
    )


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}")

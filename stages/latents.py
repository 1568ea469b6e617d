"""The one form in which latents cross the border, described so that it can be checked.

Latents are unpacked, `(B, C, H, W)` or `(B, C, F, H, W)`, except those of LTX-2, whose pipeline
unpacks picture `(B, L, C)` and sound in its decoder, and those of a family that declares another
`layout`; and scaled as the denoiser left
them: the decoder divides by `scaling_factor` and adds `shift_factor` (or undoes the mean and
standard deviation per channel). The description names the numbers that the undoing depends
on, and decode refuses latents whose numbers are not those of its VAE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stages.contracts import json_digest
from stages.errors import BorderError

_LAYOUTS = {3: "BLC", 4: "BCHW", 5: "BCFHW"}
_SCALARS = ("scaling_factor", "shift_factor")
_PER_CHANNEL = ("latents_mean", "latents_std")


def describe_latents(pipe: Any, values: Mapping[str, Any], layout: str = "") -> dict[str, Any]:
    """Layout, shape and scaling of the latents that a phase hands on, as plain JSON."""
    layouts = _LAYOUTS | ({len(layout): layout} if layout else {})
    described = {
        name: {
            "layout": layouts.get(value.ndim, f"{value.ndim}D"),
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "packed": value.ndim == 3,
            "normalized": True,
        }
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return {"tensors": described, "vae": vae_numbers(pipe)}


def check_latents(
    pipe: Any, facts: Mapping[str, Any], values: Mapping[str, Any], layout: str = ""
) -> None:
    """Refuse latents that are not what their description says, or that another VAE must decode.

    Args:
        pipe: The pipeline that will decode.
        facts: The artifact's account of itself.
        values: The tensors that the artifact holds.
        layout: The family's own, if it has one.

    Raises:
        BorderError: A scaling number or a part of the form differs; both values are named.
    """
    expected, found = describe_latents(pipe, values, layout), facts.get("latents", {})
    for name in sorted(set(expected["vae"]) | set(numbers := found.get("vae", {}))):
        if expected["vae"].get(name) != numbers.get(name):
            raise BorderError(
                f"decode: these latents were made for a VAE with {name} {numbers.get(name)!r}, "
                f"but this VAE has {expected['vae'].get(name)!r}; decode them with their own model"
            )
    for tensor, form in expected["tensors"].items():
        told = found.get("tensors", {}).get(tensor, {})
        for name, value in form.items():
            if told.get(name) != value:
                raise BorderError(
                    f"decode: the artifact describes its {tensor} with {name} {told.get(name)!r}, "
                    f"decode takes them with {value!r}; denoise them again with --fresh"
                )


def vae_numbers(pipe: Any) -> dict[str, Any]:
    """The numbers of a pipeline's VAE by which latents are scaled."""
    config = getattr(getattr(pipe, "vae", None), "config", None)
    if config is None:
        return {}
    numbers: dict[str, Any] = {name: config[name] for name in _SCALARS if name in config}
    for name in _PER_CHANNEL:
        if config.get(name) is not None:
            numbers[name] = json_digest(list(config[name]))
    return numbers

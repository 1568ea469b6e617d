"""Live values of a denoising loop to values that `stages.codec` can hold, and back.

What the codec would lose or turn into something else is spelled out here: on which device a
tensor lies, a scalar of numpy's own type, and references to objects that a process makes anew:
generators, schedulers, guiders, models. Whatever is none of these is refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Plain = Any

_AS_THEY_ARE = (type(None), bool, int, float, str, torch.dtype, torch.Size)


class NotPlain(Exception):
    """A value that no checkpoint can hold; the message names it."""


def to_plain(value: Any, path: str, known: Mapping[int, str]) -> Plain:
    """What the codec can hold of one value.

    Args:
        path: Names the value in messages.
        known: `id` of an object that every process makes by itself -> its name.

    Raises:
        NotPlain: `value`, or something in it, is of another kind.
    """
    if id(value) in known:
        return {"$known": known[id(value)]}
    kind = type(value)  # not isinstance: a subclass has more to it than its base
    if kind in _AS_THEY_ARE:
        return value
    if kind is Tensor:
        return value if value.device.type == "cpu" else {"$on_device": value.detach().cpu()}
    if kind is torch.device:
        return {"$device": kind(value).type == "cpu"}
    if kind is np.ndarray and value.dtype != object:
        return value
    if isinstance(value, np.generic):
        return {"$scalar": np.asarray([value])}
    if kind in (list, tuple):
        items = [to_plain(item, f"{path}[{index}]", known) for index, item in enumerate(value)]
        return kind(items)
    if kind is dict:
        if odd := [key for key in value if type(key) is not str]:
            raise NotPlain(f"{path} has the key {odd[0]!r}, which is not text")
        return {
            "$dict": {key: to_plain(item, f"{path}.{key}", known) for key, item in value.items()}
        }
    if kind.__module__.startswith("diffusers.") and _is_rebuildable(value):
        state = {key: to_plain(each, f"{path}.{key}", known) for key, each in vars(value).items()}
        return {"$object": f"{kind.__module__}:{kind.__qualname__}", "state": state}
    raise NotPlain(f"{path} is a {kind.__module__}.{kind.__qualname__}")


def from_plain(plain: Plain, known: Mapping[str, Any], device: str) -> Any:
    """The live value again.

    Args:
        known: This process's own objects by their names.
        device: Where tensors go that were not on the CPU.

    Raises:
        NotPlain: It refers to an object or class that is not here.
    """
    if type(plain) in (list, tuple):
        return type(plain)(from_plain(item, known, device) for item in plain)
    if not isinstance(plain, dict):
        return plain
    match plain:
        case {"$known": name}:
            if name not in known:
                raise NotPlain(f"it refers to {name}, which this process does not have")
            return known[name]
        case {"$on_device": tensor}:
            return tensor.to(device)
        case {"$device": is_cpu}:
            return torch.device("cpu" if is_cpu else device)
        case {"$scalar": array}:
            return array[0]
        case {"$dict": items}:
            return {key: from_plain(item, known, device) for key, item in items.items()}
        case {"$object": where, "state": state}:
            made = _empty(where)
            vars(made).update({k: from_plain(each, known, device) for k, each in state.items()})
            return made
    raise NotPlain(f"it holds a value of unknown kind {sorted(plain)}")


def _is_rebuildable(value: Any) -> bool:
    """Whether a small object of diffusers, such as a momentum buffer, is all in its fields."""
    if isinstance(value, torch.nn.Module) or callable(value):
        return False
    return hasattr(value, "__dict__") and "." not in type(value).__qualname__


def _empty(where: str) -> Any:
    """An object without its fields. Only classes of diffusers itself are made."""
    module, _, name = where.partition(":")
    kind = getattr(importlib.import_module(module), name, None) if _is_diffusers(module) else None
    if not isinstance(kind, type):
        raise NotPlain(f"it holds a {where}, which this diffusers does not have")
    return object.__new__(kind)


def _is_diffusers(module: str) -> bool:
    return module.startswith("diffusers.")

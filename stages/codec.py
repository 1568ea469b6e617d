"""Pipeline values to tensors plus a JSON tree, and back, exactly.

A tensor becomes a named entry; every other kind is spelled out in the tree, so that ints,
None, tuples, dtypes and nested lists come back as what they were. Strides are kept where a
tensor is not contiguous: convolutions choose their kernel by memory format, and another
kernel means other bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stages.errors import ArtifactError

Tree = Any  # JSON: the shape of one value, with tensors replaced by their entry's name


def to_entries(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tree]:
    """Take values apart into contiguous CPU tensors and a JSON tree.

    Args:
        values: Any nesting of tensors, lists, tuples, dicts with text keys, None, bool, int,
            float, str, `torch.dtype`, `torch.Size`, numpy arrays and PIL pictures.

    Returns:
        Entries by dotted path (no two share storage), and the tree.

    Raises:
        ArtifactError: A value of another kind, named by its path.

    Synchronises with the device of each tensor.
    """
    entries: dict[str, Tensor] = {}
    return entries, {name: _take_apart(value, name, entries) for name, value in values.items()}


def from_entries(entries: Mapping[str, Tensor], tree: Tree) -> dict[str, Any]:
    """Put values together again from what `to_entries` made."""
    return {name: _put_together(value, entries) for name, value in tree.items()}


def _take_apart(value: Any, path: str, entries: dict[str, Tensor]) -> Tree:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            entries[path] = value.detach().cpu().contiguous().clone()
            if value.is_contiguous():
                return {"$tensor": path}
            return {"$tensor": path, "stride": list(value.stride())}
        case torch.dtype():
            return {"$dtype": str(value).removeprefix("torch.")}
        case torch.Size():
            return {"$size": [int(item) for item in value]}
        case np.ndarray():
            entries[path] = torch.from_numpy(np.ascontiguousarray(value)).clone()
            return {"$array": path}
        case np.generic():
            return value.item()
        case Image.Image():
            entries[path] = torch.from_numpy(np.array(value))
            return {"$picture": path, "mode": value.mode}
        case tuple():
            return {"$tuple": _take_each(value, path, entries)}
        case list():
            return _take_each(value, path, entries)
        case dict():
            return {
                "$dict": {
                    key: _take_apart(item, f"{path}.{key}", entries) for key, item in value.items()
                }
            }
    raise ArtifactError(
        f"{path} is a {type(value).__name__}, which an artifact cannot hold; "
        "declare it in the family or leave it out of what the phase hands on"
    )


def _take_each(items: list[Any] | tuple[Any, ...], path: str, entries: dict[str, Tensor]) -> Tree:
    return [_take_apart(item, f"{path}.{index}", entries) for index, item in enumerate(items)]


def _put_together(tree: Tree, entries: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_put_together(item, entries) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"$tensor": name, "stride": stride}:
            return _with_stride(entries[name], stride)
        case {"$tensor": name}:
            return entries[name]
        case {"$dtype": name}:
            return getattr(torch, name)
        case {"$size": items}:
            return torch.Size(items)
        case {"$array": name}:
            return entries[name].numpy()
        case {"$picture": name, "mode": mode}:
            return Image.fromarray(entries[name].numpy(), mode)
        case {"$tuple": items}:
            return tuple(_put_together(item, entries) for item in items)
        case {"$dict": items}:
            return {key: _put_together(item, entries) for key, item in items.items()}
    raise ArtifactError(
        f"unknown value kind {sorted(tree)} in an artifact; it is from a newer version"
    )


def _with_stride(tensor: Tensor, stride: list[int]) -> Tensor:
    if 0 in stride:  # an expanded tensor: its values are all there, its aliasing is not needed
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

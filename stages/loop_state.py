"""All that a denoising loop carries from one step to the next, taken out and put back.

What stands before the loop is run again when a denoise resumes, so only what the loop itself
changes is kept: those values of its block state, the fields of every scheduler and guider, and
the state of every generator. No family and no scheduler is known by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from stages.plain_values import NotPlain, Plain, from_plain, to_plain

_CONFIG = "_internal_dict"  # of diffusers: what an object was made from, the same in each process
_INERT = (
    *(type(None), bool, int, float, str, bytes, enum.Enum, type, FunctionType),
    *(torch.dtype, torch.device, torch.nn.Module),
)  # a step puts another one in their place, or leaves them as they are


class LoopState:
    """One loop's values as they were before its first step, and what became of them.

    Args:
        pipe: The pipeline, with its components.
        block_state: The loop's own values.

    Keeps the first values alive, so that none of a later step can be taken for one of them.

    Raises:
        NotPlain: The loop holds an object whose changes could not be seen.
    """

    def __init__(self, pipe: Any, block_state: Any) -> None:
        values = dict(vars(block_state))
        self._objects = _stateful_objects(pipe, values)
        self._generators = list(_generators(values))
        known: dict[str, Any] = {
            **{f"component {name}": part for name, part in pipe.components.items()},
            **self._objects,
            **{f"generator {n}": each for n, each in enumerate(self._generators)},
        }
        self._known = {name: each for name, each in known.items() if each is not None}
        self._names = {id(each): name for name, each in self._known.items()}
        for name, value in values.items():
            _require_visible(value, f"block value {name}", self._names)
        self._marks = {name: _Mark(value) for name, value in values.items()}

    def capture(self, block_state: Any) -> dict[str, Plain]:
        """What the steps so far have changed, as values for `stages.codec`.

        Raises:
            NotPlain: Something in it is of a kind that a checkpoint cannot hold.

        Synchronises with the device.
        """
        changed = {
            name: to_plain(value, f"block value {name}", self._names)
            for name, value in vars(block_state).items()
            if name not in self._marks or not self._marks[name].holds(value)
        }
        objects = {
            name: {
                "class": type(each).__qualname__,
                "fields": {
                    key: to_plain(value, f"{name}.{key}", self._names)
                    for key, value in vars(each).items()
                    if key != _CONFIG
                },
            }
            for name, each in self._objects.items()
        }
        generators = [each.get_state() for each in self._generators]
        return {"values": changed, "objects": objects, "generators": generators}

    def restore(self, captured: dict[str, Plain], block_state: Any, device: str) -> None:
        """Put back what `capture` took, into a loop that has not made a step.

        Args:
            device: Where tensors go that were not on the CPU.

        Raises:
            NotPlain: It does not fit this loop; then nothing was changed.
        """
        classes = {name: type(each).__qualname__ for name, each in self._objects.items()}
        found = {name: each["class"] for name, each in captured["objects"].items()}
        if found != classes or len(captured["generators"]) != len(self._generators):
            raise NotPlain(
                f"it holds {found} and {len(captured['generators'])} generators, but this loop "
                f"has {classes} and {len(self._generators)}"
            )
        values = {
            name: from_plain(each, self._known, device) for name, each in captured["values"].items()
        }
        fields = {
            name: {
                key: from_plain(value, self._known, device) for key, value in each["fields"].items()
            }
            for name, each in captured["objects"].items()
        }
        for name, value in values.items():
            setattr(block_state, name, value)
        for name, each in self._objects.items():
            kept = {key: value for key, value in vars(each).items() if key == _CONFIG}
            vars(each).clear()
            vars(each).update(kept | fields[name])
        for generator, state in zip(self._generators, captured["generators"], strict=True):
            generator.set_state(state)


class _Mark:
    """A value at one moment: tells later whether another one, or a change, took its place."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = _version(value)
        self._parts = [_Mark(part) for part in _parts(value)]

    def holds(self, value: Any) -> bool:
        parts = list(_parts(value))
        return (
            value is self._value
            and _version(value) == self._version
            and len(parts) == len(self._parts)
            and all(mark.holds(part) for mark, part in zip(self._parts, parts, strict=True))
        )


def _version(value: Any) -> int | None:
    """Counts the changes of a tensor in place."""
    return int(value._version) if isinstance(value, Tensor) else None


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield item
    elif isinstance(value, list | tuple):
        yield from value


def _generators(value: Any) -> Iterator[torch.Generator]:
    """Every generator in a nesting of lists and dicts, once, in order."""
    seen: set[int] = set()

    def walk(part: Any) -> Iterator[torch.Generator]:
        if isinstance(part, torch.Generator) and id(part) not in seen:
            seen.add(id(part))
            yield part
        for each in _parts(part):
            yield from walk(each)

    yield from walk(value)


def _stateful_objects(pipe: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Schedulers and guiders, of the pipeline or among the loop's values, by a name of theirs."""
    from diffusers.guiders import BaseGuidance
    from diffusers.schedulers import SchedulerMixin

    kinds = (SchedulerMixin, BaseGuidance)
    found = {f"component {n}": c for n, c in pipe.components.items() if isinstance(c, kinds)}
    seen = {id(each) for each in found.values()}
    for name, value in values.items():
        if isinstance(value, kinds) and id(value) not in seen:
            seen.add(id(value))
            found[f"block value {name}"] = value
    return found


def _require_visible(value: Any, path: str, names: dict[int, str]) -> None:
    """Refuse objects that a step could change behind our back, such as a cache."""
    if isinstance(value, Tensor) and value.is_inference():
        raise NotPlain(f"{path} is an inference tensor, whose changes in place do not show")
    for part in _parts(value):
        _require_visible(part, path, names)
    if not isinstance(value, (*_INERT, Tensor, list, tuple, dict)) and id(value) not in names:
        raise NotPlain(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")

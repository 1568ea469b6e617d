"""What torch computes and holds in a call, at full size and in no time: on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def flops_of(call: Callable[[], Any]) -> int:
    """Operations of a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def peak_of(call: Callable[[], Any]) -> int:
    """Most bytes that a call allocates and holds at a time, with attention that keeps no matrix."""
    attention = "torch.nn.functional.scaled_dot_product_attention"
    with torch.no_grad(), mock.patch(attention, _attend), _Allocations() as found:
        call()
    return found.peak


def _attend(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._nbytes = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):  # storages that were there before cost nothing
            self._see(each, is_new=False)
        for each in tree_leaves(made):
            self._see(each, is_new=True)
        return made

    def _see(self, found: Any, *, is_new: bool) -> None:
        if not isinstance(found, torch.Tensor):
            return
        storage = found.untyped_storage()
        if storage._cdata in self._nbytes:
            return
        self._nbytes[storage._cdata] = storage.nbytes() if is_new else 0
        self._now += self._nbytes[storage._cdata]
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self._now -= self._nbytes.pop(key)

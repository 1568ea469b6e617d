"""Finds weights that are used outside of their own module's `forward`.

Such a weight is on the CPU when it is used, and the operator fails on a device. The step is
then run once more under `StrayFinder`, which notes the weight and lends it to the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ddo.blocks import Block


class StrayFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operators use weights that are not on the device, and remembers their blocks.

    Attributes:
        found: Numbers of the blocks whose weights were used.
    """

    def __init__(self, blocks: Iterable[tuple[int, Block]], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()
        self._device = device
        self._spans = [
            (m.found.data_ptr(), m.found.data_ptr() + m.found.nbytes, number)
            for number, block in blocks
            for m in block.members
            if m.found.numel()
        ]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the tensors inside come by when the wrapper computes with them
        args, kwargs = tree_map_only(Tensor, self._lend, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lend(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        address = tensor.data_ptr()
        for begin, end, number in self._spans:
            if begin <= address < end:
                self.found.add(number)
                return tensor.to(self._device)
        return tensor

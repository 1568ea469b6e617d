"""Finds weights that are used outside of their own module's `forward`.

Such a weight is on the CPU when it is used, and the operator fails on a device. The step is
then run once more under `StrayFinder`, which notes the weight and lends it to the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ddo.blocks import Block
from ddo.compiled import is_region


class StrayFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operators use weights that are not on the device, and remembers their blocks.

    Torch compiles nothing under such a mode: compiled blocks run as they were written.

    Attributes:
        found: Numbers of the blocks whose weights were used.
        ran_uncompiled: Whether there are compiled blocks, whose results may differ in the last
            bits now.
    """

    def __init__(self, blocks: Iterable[tuple[int, Block]], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        blocks = list(blocks)
        self.found: set[int] = set()
        self.ran_uncompiled = any(is_region(user) for _, block in blocks for user in block.users)
        self._stance = ExitStack()
        self._device = device
        self._spans = [
            (m.found.data_ptr(), m.found.data_ptr() + m.found.nbytes, number)
            for number, block in blocks
            for m in block.members
            if m.found.numel()
        ]

    def __enter__(self) -> Self:
        if self.ran_uncompiled:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        finally:
            self._stance.close()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the tensors inside come by when the wrapper computes with them
        if func is torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))  # takes it from the host; so does the ring
        args, kwargs = tree_map_only(Tensor, self._lend, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _lend(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        address = tensor.data_ptr()
        for begin, end, number in self._spans:
            if begin <= address < end:
                self.found.add(number)
                # A copy of it first: what lies on the border of a registration cannot be read.
                return tensor.clone().to(self._device)
        return tensor

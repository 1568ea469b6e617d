"""Notices between two steps that a module is no longer what a session has taken over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ddo.blocks import Block, Member
from ddo.compiled import compiled_code
from ddo.source import PageFlags


class Structure:
    """The modules, weights and buffers of a module at one moment. Quick to compare."""

    def __init__(self, module: nn.Module) -> None:
        children = list(module.modules())
        self._tables: list[dict[str, Any]] = [
            table for child in children for table in (child._modules, child._parameters)
        ]
        self._attributes = [vars(child) for child in children]
        self._buffers = [child._buffers for child in children]
        self._known = self._parts()
        self._members: list[Member] = []
        self._tensors: list[Tensor] = []
        self._pages: PageFlags | None = None

    def watch(self, blocks: Sequence[Block]) -> None:
        """Compare these blocks' weights as well: whether their data are what was bound."""
        self._members = [member for block in blocks for member in block.members]
        self._tensors = [member.tensor for member in self._members]
        self._pages = PageFlags()

    def close(self) -> None:
        """Give the kernel's table of pages back."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def is_same(self) -> bool:
        """Whether no layer, weight or buffer was added, removed or replaced."""
        return self._parts() == self._known and list(map(Tensor.data_ptr, self._tensors)) == [
            m.bound for m in self._members
        ]

    def _parts(self) -> tuple[list[int], int, list[int]]:
        """Identities of modules, weights and compiled code, and the number of buffers.

        Made for every step, at times while the device has nothing to do: no loop of Python's own.
        """
        entries = chain.from_iterable(map(dict.values, self._tables))
        code = compiled_code(self._attributes)
        return list(map(id, entries)), sum(map(len, self._buffers)), code

    def is_rewritten(self) -> bool:
        """Whether a mapped weight was written to while it was bound to the host.

        The write has given its pages to this process, and the copy to the device would still
        read the file. Whoever writes a weight writes all of it, so that one page tells. A
        resident weight is bound to the device, where a write needs no notice. Asks the kernel
        once a weight: a few milliseconds for a large model.
        """
        if self._pages is None:
            return False
        return any(
            self._pages.is_private(member.bound + member.found.nbytes // 2)
            for member in self._members
            if member.is_mapped and member.bound == member.address
        )


def keep_replaced(blocks: Iterable[Block]) -> list[str]:
    """Let weights keep data that somebody else has given them; returns their names."""
    names: list[str] = []
    for block in blocks:
        for member in block.members:
            if member.tensor.data_ptr() != member.bound:
                member.found = member.tensor.data
                member.bound = member.address = member.tensor.data_ptr()
                names.append(member.name)
    return names

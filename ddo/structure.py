"""Notices between two steps that a module is no longer what a session has taken over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ddo.blocks import Block, Member
from ddo.source import PageFlags


class Structure:
    """The modules, weights and buffers of a module at one moment. Quick to compare."""

    def __init__(self, module: nn.Module) -> None:
        self._known = _parts(module)
        self._members: list[Member] = []
        self._pages: PageFlags | None = None
        self._is_forgotten = False

    def watch(self, blocks: Sequence[Block]) -> None:
        """Compare these blocks' weights as well: whether their data are what was bound."""
        self._members = [member for block in blocks for member in block.members]
        self._pages = PageFlags()

    def forget(self) -> None:
        """Answer that everything has changed."""
        self._is_forgotten = True

    def close(self) -> None:
        """Give the kernel's table of pages back."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def is_same(self, module: nn.Module) -> bool:
        """Whether no layer, weight or buffer was added, removed, replaced or rewritten."""
        return (
            not self._is_forgotten
            and _parts(module) == self._known
            and not any(member.tensor.data_ptr() != member.bound for member in self._members)
            and not self._is_rewritten()
        )

    def _is_rewritten(self) -> bool:
        """Whether a mapped weight was written to while it was bound to the host.

        The write has given its pages to this process, and the copy to the device would still
        read the file. Whoever writes a weight writes all of it, so that one page tells. A
        resident weight is bound to the device, where a write needs no notice.
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


def _parts(module: nn.Module) -> list[tuple[int, ...]]:
    """Identities of all modules and of what each of them holds."""
    parts: list[tuple[int, ...]] = []
    seen: set[int] = set()
    todo = [module]
    while todo:
        child = todo.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        children = [m for m in child._modules.values() if m is not None]
        todo += children
        parts.append(
            (id(child), *map(id, children), *map(id, child._parameters.values()),
             len(child._buffers))
        )  # fmt: skip
    return parts

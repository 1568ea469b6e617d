"""Notices between two steps that a module is no longer what a session has taken over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ddo.blocks import Block
from ddo.source import PageFlags


class Structure:
    """The modules, weights and buffers of a module at one moment. Quick to compare."""

    def __init__(self, module: nn.Module) -> None:
        self._known = _parts(module)
        self._blocks: Sequence[Block] = ()
        self._pages: PageFlags | None = None
        self._is_forgotten = False

    def watch(self, blocks: Sequence[Block]) -> None:
        """Compare these blocks' weights as well: whether their data are what was bound."""
        self._blocks = blocks
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
            and not any(self._is_touched(block) for block in self._blocks)
        )

    def _is_touched(self, block: Block) -> bool:
        for member in block.members:
            if member.tensor.data_ptr() != member.bound:
                return True
            # A write to a mapped weight gives its pages to this process. Whoever writes a
            # weight writes all of it, so that one page tells; the copy to the device would
            # still read the file.
            if member.is_mapped and self._pages is not None:
                middle = member.found.data_ptr() + member.found.nbytes // 2
                if self._pages.is_private(middle):
                    return True
        return False


def keep_replaced(blocks: Iterable[Block]) -> list[str]:
    """Let weights keep data that somebody else has given them; returns their names."""
    names: list[str] = []
    for block in blocks:
        for member in block.members:
            if member.tensor.data_ptr() != member.bound:
                member.found = member.tensor.data
                member.bound = member.tensor.data_ptr()
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

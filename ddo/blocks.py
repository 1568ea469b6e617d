"""A module taken apart into blocks: the weights that one layer uses, which move together.

A block belongs to modules without children, whose `forward` begins and ends its use. Weights
that a module holds beside its children are in use while those run, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from ddo.host_sources import HostSources, map_shared
from ddo.inner import Shell, plain_data, shells
from ddo.layout import BlockLayout, Piece, align_up, lay_out_block
from ddo.owning import NotOwnable, find_obstacle
from ddo.planning import BlockSpec
from ddo.source import byte_view
from ddo.transfer import HostCopy
from ddo.users import Use, uses_of_weights
from ddo.weight_files import SourceError, WeightFiles

_FIRST_BLOCK_SHARE = 0.05
_SMALL_BYTES = 64 << 10
_GATHERED = -1  # the source that stands for gathered tensors; other memory counts down from -2

__all__ = [
    "Block",
    "Inventory",
    "Member",
    "NotOwnable",
    "map_shared",
    "take_inventory",
]


@dataclass(slots=True, eq=False)
class Member:
    """One weight of a block.

    Attributes:
        names: In the module; several if it is tied.
        tensor: The parameter, or a plain tensor inside of it, whose `data` is exchanged.
        found: Its data when it was found, on the CPU.
        offset: First byte in the block.
        is_mapped: Whether a file holds the same bytes.
        address: Where the data lie that were found.
        bound: Where the data lie that the module computes with.
        others: Further objects that are the same tensor.
        weight: The parameter that `tensor` is a part of, if it is not the parameter itself.
    """

    names: tuple[str, ...]
    tensor: Tensor
    found: Tensor
    offset: int = 0
    is_mapped: bool = False
    address: int = 0
    bound: int = 0
    others: tuple[Tensor, ...] = ()
    weight: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter, as the module sees it."""
        return (self.tensor if self.weight is None else self.weight).dtype

    @property
    def requires_grad(self) -> bool:
        """Whether a backward pass would want it."""
        return (self.tensor if self.weight is None else self.weight).requires_grad

    @property
    def name(self) -> str:
        """Its first name in the module."""
        return self.names[0]

    def view(self, memory: Tensor) -> Tensor:
        """The weight as it lies in a block's memory of shape `(nbytes,)`."""
        nbytes = self.found.numel() * self.found.element_size()
        if not nbytes:
            return self.found.to(memory.device)
        raw = memory[self.offset : self.offset + nbytes]
        return raw.view(self.found.dtype).as_strided(self.found.shape, self.found.stride())

    def bind(self, data: Tensor) -> None:
        """Let the module compute with `data`."""
        self.tensor.data = data
        for other in self.others:
            other.data = data
        self.bound = data.data_ptr()


@dataclass(slots=True, eq=False)
class Block:
    """Weights that move together.

    Attributes:
        name: The first module that uses it.
        users: Modules whose `forward` uses it.
        members: Its weights.
        must_stay: Why it cannot leave the device; empty if it can.
        shells: Of the quantized weights whose tensors are here.
    """

    name: str
    users: tuple[nn.Module, ...]
    members: list[Member]
    must_stay: str = ""
    shells: list[Shell] = field(default_factory=list)
    layout: BlockLayout = field(default_factory=lambda: lay_out_block([]))
    copies: tuple[HostCopy, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def views(self, memory: Tensor) -> list[Tensor]:
        """Its weights as they lie in device memory of shape `(nbytes,)`."""
        return [member.view(memory) for member in self.members]

    def was_given_data(self) -> bool:
        """Whether somebody else has replaced what a weight was bound to."""
        return any(member.tensor.data_ptr() != member.bound for member in self.members)

    def bind(self, views: Sequence[Tensor]) -> None:
        """Let all users compute with these."""
        for member, view in zip(self.members, views, strict=True):
            member.bind(view)
        for shell in self.shells:
            shell.place()

    def unbind(self) -> None:
        """Give every weight the data that was found."""
        for member in self.members:
            member.bind(member.found)
        for shell in self.shells:
            shell.restore()

    def spec(self, compute_weight: float | None = None) -> BlockSpec:
        """The block as the planner sees it."""
        weight = float(self.nbytes) if compute_weight is None else compute_weight
        return BlockSpec(
            name=self.name, nbytes=self.nbytes, compute_weight=weight, must_stay=self.must_stay
        )


@dataclass(slots=True)
class Inventory:
    """What a module consists of.

    Attributes:
        blocks: In the order of definition, the best guess for the order of use.
        buffers: `(module, name, data found)` of all buffers; they stay on the device.
        own_memory_bytes: Weights that no file backs.
        placed: Names of weights that are on the device already; they are left alone.
    """

    blocks: list[Block]
    buffers: list[tuple[nn.Module, str, Tensor]]
    own_memory_bytes: int
    placed: list[str]


def take_inventory(
    module: nn.Module, device: torch.device, hints: WeightFiles | None = None
) -> Inventory:
    """The blocks of a module, each weight in exactly one of them.

    Args:
        hints: Files that the weights may have come from; see `ddo.host_sources`.

    Raises:
        NotOwnable: See `find_obstacle`.
        SourceError: A weight has no values.
    """
    if obstacle := find_obstacle(module):
        raise NotOwnable(f"{obstacle.reason}; {obstacle.remedy}")
    groups: dict[tuple[int, ...], Block] = {}
    placed: list[str] = []
    shelled: set[int] = set()
    for use in uses_of_weights(module):
        if use.tensors[0].is_meta:
            raise SourceError(f"weight {use.names[0]!r} has no values; load it before attaching")
        if use.tensors[0].device.type != "cpu":
            placed.append(use.names[0])
            continue
        member = _member(use)
        if device.type == "cpu" and byte_view(member.found) is None:
            raise NotOwnable(f"weight {use.names[0]!r} shares elements; make it contiguous")
        key = tuple(id(user) for user in use.users)
        if key not in groups:
            groups[key] = Block(
                name=use.user_name or use.names[0],
                users=tuple(use.users),
                members=[],
                must_stay=use.why_must_stay(),
            )
        groups[key].members.append(member)
        if member.weight is not None and id(member.weight) not in shelled:
            shelled.add(id(member.weight))
            groups[key].shells += shells(member.weight)
    blocks = list(groups.values())
    _make_names_unique(blocks)
    own = _lay_out(blocks, HostSources(hints))
    _keep_first(blocks)
    buffers = [
        (child, name, buffer)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    return Inventory(blocks=blocks, buffers=buffers, own_memory_bytes=own, placed=placed)


def _member(use: Use) -> Member:
    tensor, *others = use.tensors
    found = plain_data(tensor)
    return Member(
        tuple(use.names),
        tensor,
        found,
        address=found.data_ptr(),
        bound=found.data_ptr(),
        others=tuple(others),
        weight=use.weight if use.weight is not tensor else None,
    )


def _make_names_unique(blocks: list[Block]) -> None:
    """A module with weights of its own and tied ones is in two blocks."""
    seen: set[str] = set()
    for block in blocks:
        if block.name in seen:
            block.name = block.members[0].name
        seen.add(block.name)


def _keep_first(blocks: list[Block]) -> None:
    """Code asks the first weight for the module's device, so it should be there if it is small."""
    total = sum(block.nbytes for block in blocks)
    if blocks and not blocks[0].must_stay and blocks[0].nbytes <= _FIRST_BLOCK_SHARE * total:
        blocks[0].must_stay = "first weight, which tells callers the module's device"


def _gather_small(members: Sequence[Member]) -> dict[int, tuple[int, int, Tensor]]:
    """Copies of a quantized weight's scales, zero points and such in one stretch of memory.

    They are a few hundred bytes each, and copying them to the device one by one takes longer
    than their bytes do. The weight itself keeps its own.
    """
    largest = max((member.found.nbytes for member in members), default=0)
    limit = min(_SMALL_BYTES, largest - 1)
    small = [m for m in members if m.weight is not None and m.found.nbytes <= limit]
    begins = list(accumulate((align_up(m.found.nbytes) for m in small), initial=0))
    memory = torch.zeros(begins.pop(), dtype=torch.uint8)
    places: dict[int, tuple[int, int, Tensor]] = {}
    for member, begin in zip(small, begins, strict=True):
        found = byte_view(member.found)
        if found is not None:
            memory[begin : begin + found.numel()] = found
            places[id(member)] = (_GATHERED, begin, memory)
    return places


def _lay_out(blocks: list[Block], sources: HostSources) -> int:
    """Find each weight's bytes and place them in its block; returns bytes without a file."""
    own_bytes = 0
    for block in blocks:
        pieces: list[Piece] = []
        memories: dict[int, Tensor] = {}
        gathered = _gather_small(block.members)
        for member in block.members:
            memory = byte_view(member.found)
            if memory is None:
                raise NotOwnable(f"weight {member.name!r} shares elements; make it contiguous")
            if id(member) in gathered:
                key, offset, memories[key] = gathered[id(member)]
                own_bytes += memory.numel()
                # With what is between this one and the next, so that they are one copy.
                pieces.append(Piece(key, offset, align_up(memory.numel())))
                continue
            # A file holds its tensors in the order of their axes.
            names = member.names if member.found.is_contiguous() else ()
            source = sources.locate(names, memory)
            if source is not None:
                key, offset, memories[key] = source
                member.is_mapped = True
            else:
                key, offset = _GATHERED - 1 - len(pieces), 0
                memories[key] = memory
                own_bytes += memory.numel()
            pieces.append(Piece(key, offset, memory.numel()))
        block.layout = lay_out_block(pieces)
        for member, offset in zip(block.members, block.layout.offsets, strict=True):
            member.offset = offset
        block.copies = tuple(
            HostCopy(memories[c.key][c.offset : c.offset + c.nbytes], c.target_offset)
            for c in block.layout.copies
        )
    return own_bytes

"""A module taken apart into blocks: the weights that one layer uses, which move together.

A block belongs to modules without children, whose `forward` begins and ends its use. Weights
that a module holds beside its children are in use while those run, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddo.errors import DdoError
from ddo.host_sources import HostSources, map_shared
from ddo.layout import BlockLayout, Piece, lay_out_block
from ddo.planning import BlockSpec
from ddo.source import byte_view
from ddo.transfer import HostCopy
from ddo.weight_files import SourceError, WeightFiles

# These read their children's weights without calling them, or replace the whole call by one
# fused operator, so that hooks on the children would never run.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_FIRST_BLOCK_SHARE = 0.05

__all__ = [
    "Block",
    "Inventory",
    "Member",
    "NotOwnable",
    "map_shared",
    "take_inventory",
    "why_not_ownable",
]


class NotOwnable(DdoError, TypeError):
    """A module's weights cannot be moved as bytes; the message says why."""


@dataclass(slots=True, eq=False)
class Member:
    """One weight of a block.

    Attributes:
        names: In the module; several if it is tied.
        tensor: The parameter or buffer object, whose `data` is exchanged.
        found: Its data when it was found, on the CPU.
        offset: First byte in the block.
        is_mapped: Whether a file holds the same bytes.
        address: Where the data lie that were found.
        bound: Where the data lie that the module computes with.
    """

    names: tuple[str, ...]
    tensor: Tensor
    found: Tensor
    offset: int = 0
    is_mapped: bool = False
    address: int = 0
    bound: int = 0

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
        self.bound = data.data_ptr()


@dataclass(slots=True, eq=False)
class Block:
    """Weights that move together.

    Attributes:
        name: The first module that uses it.
        users: Modules whose `forward` uses it.
        members: Its weights.
        must_stay: Why it cannot leave the device; empty if it can.
    """

    name: str
    users: tuple[nn.Module, ...]
    members: list[Member]
    must_stay: str = ""
    layout: BlockLayout = field(default_factory=lambda: lay_out_block([]))
    copies: tuple[HostCopy, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def views(self, memory: Tensor) -> list[Tensor]:
        """Its weights as they lie in device memory of shape `(nbytes,)`."""
        return [member.view(memory) for member in self.members]

    def bind(self, views: Sequence[Tensor]) -> None:
        """Let all users compute with these."""
        for member, view in zip(self.members, views, strict=True):
            member.bind(view)

    def unbind(self) -> None:
        """Give every weight the data that was found."""
        for member in self.members:
            member.bind(member.found)

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


def why_not_ownable(module: nn.Module) -> str | None:
    """Why weights cannot be moved as bytes; None if they can."""
    for name, child in module.named_modules():
        where = f"{name or 'the module'} ({type(child).__name__})"
        if _has_offload_hook(child):
            return f"{where} has hooks of another offloader"
        if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None):
            return f"{where} is compiled"
        for tensor_name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is None:
                continue
            if type(tensor.data) is not Tensor or type(tensor) not in _PLAIN:
                return f"{tensor_name} of {where} is a {type(tensor).__name__}, more than its bytes"
    return None


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _has_offload_hook(child: nn.Module) -> bool:
    if hasattr(child, "_hf_hook"):
        return True
    hooks = getattr(getattr(child, "_diffusers_hook", None), "hooks", {})
    return any("offload" in name for name in hooks)


def take_inventory(
    module: nn.Module, device: torch.device, hints: WeightFiles | None = None
) -> Inventory:
    """The blocks of a module, each weight in exactly one of them.

    Args:
        hints: Files that the weights may have come from; see `ddo.host_sources`.

    Raises:
        NotOwnable: See `why_not_ownable`.
        SourceError: A weight has no values.
    """
    if reason := why_not_ownable(module):
        raise NotOwnable(f"{reason}: {type(module).__name__}; take preset group or resident")
    groups: dict[tuple[int, ...], Block] = {}
    placed: list[str] = []
    for names, tensor, users in _weights(module):
        if tensor.is_meta:
            raise SourceError(f"weight {names[0]!r} has no values; load it before attaching")
        if tensor.device.type != "cpu":
            placed.append(names[0])
            continue
        if device.type == "cpu" and byte_view(tensor.data) is None:
            raise NotOwnable(f"weight {names[0]!r} shares elements; make it contiguous")
        key = tuple(id(user) for user in users)
        if key not in groups:
            groups[key] = Block(
                name=names[0].rpartition(".")[0] or names[0],
                users=tuple(users),
                members=[],
                must_stay=_must_stay(users),
            )
        groups[key].members.append(
            Member(
                tuple(names),
                tensor,
                tensor.data,
                address=tensor.data_ptr(),
                bound=tensor.data_ptr(),
            )
        )
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


def _weights(module: nn.Module) -> Iterator[tuple[list[str], nn.Parameter, list[nn.Module]]]:
    """Every parameter once, with its names and the modules in whose `forward` it is used."""
    found: dict[int, tuple[list[str], nn.Parameter, list[nn.Module]]] = {}
    for name, child, user in _walk(module, "", None, set()):
        for own_name, parameter in child._parameters.items():
            if parameter is None:
                continue
            entry = found.setdefault(id(parameter), ([], parameter, []))
            entry[0].append(f"{name}.{own_name}" if name else own_name)
            if user not in entry[2]:
                entry[2].append(user)
    yield from found.values()


def _walk(
    module: nn.Module, name: str, opaque: nn.Module | None, seen: set[int]
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Modules with the module that uses their weights: themselves, or an opaque one around."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if opaque is None and (isinstance(module, _OPAQUE) or "parametrizations" in module._modules):
        opaque = module
    yield name, module, opaque or module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, opaque, seen)


def _must_stay(users: Sequence[nn.Module]) -> str:
    for user in users:
        is_opaque = isinstance(user, _OPAQUE) or "parametrizations" in user._modules
        if not is_opaque and any(child is not None for child in user._modules.values()):
            return "used beside the modules inside of its own"
    return ""


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


def _lay_out(blocks: list[Block], sources: HostSources) -> int:
    """Find each weight's bytes and place them in its block; returns bytes without a file."""
    own_bytes = 0
    for block in blocks:
        pieces: list[Piece] = []
        memories: dict[int, Tensor] = {}
        for member in block.members:
            memory = byte_view(member.found)
            if memory is None:
                raise NotOwnable(f"weight {member.name!r} shares elements; make it contiguous")
            # A file holds its tensors in the order of their axes.
            names = member.names if member.found.is_contiguous() else ()
            source = sources.locate(names, memory)
            if source is not None:
                key, offset, memories[key] = source
                member.is_mapped = True
            else:
                key, offset = -1 - len(pieces), 0
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

"""Which module's `forward` begins and ends the use of each weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ddo.compiled import is_region, original_name
from ddo.inner import inner_tensors

# These read their children's weights without calling them, or replace the whole call by one
# fused operator, so that hooks on the children would never run.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(slots=True, eq=False)
class Use:
    """One plain tensor, and who uses it.

    Attributes:
        user_name: Of the first module that uses it.
        names: Of the tensor in the module; several if it is tied.
        tensors: The objects that are this tensor; see `ddo.inner.Inner`.
        weight: The parameter that it is, or is a part of.
        users: Modules in whose `forward` it is used.
        num_weights: Parameters that it is a part of.
    """

    user_name: str
    names: list[str]
    tensors: tuple[Tensor, ...]
    weight: nn.Parameter
    users: list[nn.Module]
    num_weights: int = 1

    def why_must_stay(self) -> str:
        """Why it cannot leave the device; empty if it can."""
        if self.num_weights > 1:
            return "table that several quantized weights share"
        for user in self.users:
            if not _is_opaque(user) and any(c is not None for c in user._modules.values()):
                return "used beside the modules inside of its own"
        return ""


def uses_of_weights(module: nn.Module) -> list[Use]:
    """Every plain tensor of every parameter once, in the order of definition."""
    found: dict[int, Use] = {}
    for name, child, user_name, user in _walk(module, "", None, set()):
        for own_name, weight in child._parameters.items():
            if weight is None:
                continue
            full_name = f"{name}.{own_name}" if name else own_name
            for inner in inner_tensors(weight, child):
                path = original_name(f"{full_name}.{inner.path}" if inner.path else full_name)
                known = found.get(id(inner.tensors[0]))
                if known is None:
                    use = Use(original_name(user_name), [path], inner.tensors, weight, [user])
                    found[id(inner.tensors[0])] = use
                    continue
                known.names.append(path)
                known.num_weights += known.weight is not weight
                if user not in known.users:
                    known.users.append(user)
    return list(found.values())


def _is_opaque(module: nn.Module) -> bool:
    """Whether a module computes with weights inside of it without their modules' `forward`."""
    is_parametrized = "parametrizations" in module._modules
    return isinstance(module, _OPAQUE) or is_parametrized or is_region(module)


def _walk(
    module: nn.Module, name: str, opaque: tuple[str, nn.Module] | None, seen: set[int]
) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Modules with the one that uses their weights: itself, or an opaque one around; both named."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if opaque is None and _is_opaque(module):
        opaque = (name, module)
    yield (name, module, *(opaque or (name, module)))
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, opaque, seen)

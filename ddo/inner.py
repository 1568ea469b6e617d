"""What a weight consists of: plain tensors whose bytes move, and a class that computes with them.

Most weights are one plain tensor. A quantized one keeps its class and its own `forward`, while
the tensors inside of it are bound to other memory. There are two kinds:

- a wrapper holds no memory itself and names its tensors by `__tensor_flatten__` (torchao,
  quanto); its device is written down apart from them, see `Shell`;
- a tensor with a class of its own has memory, and further tensors as attributes (GGUF,
  bitsandbytes). What such a class hides cannot be seen, so only known ones are taken.

Libraries are told by name; none is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_WITH_MEMORY = ("diffusers.GGUFParameter", "bitsandbytes.Params4bit", "bitsandbytes.Int8Params")
_BOUND_TO_DEVICE = (
    # Their bytes lie as one kind of device wants them; moving to another kind packs them anew.
    "optimum.quanto.TinyGemmWeightQBitsTensor",
    "optimum.quanto.AWQWeightQBitsTensor",
    "optimum.quanto.MarlinF8QBytesTensor",
    "optimum.quanto.MarlinInt4WeightQBitsTensor",
    "torchao.IntxOpaqueTensor",
)
_NAMESPACES = ("optimum",)  # packages that several libraries share


@dataclass(frozen=True, slots=True)
class Inner:
    """One plain tensor of a weight.

    Attributes:
        path: Its attribute in the weight, such as `quant_state.absmax`; empty for the weight.
        tensors: The objects that are this tensor: several if a library keeps it twice.
    """

    path: str
    tensors: tuple[Tensor, ...]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes and nothing else."""
    return type(tensor) in _PLAIN and type(tensor.data) is Tensor


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why weights cannot be moved as bytes, and what else can be done with them.

    Attributes:
        reason: Names the weight, its library and its class.
        remedy: What the user can do.
        may_be_resident: Whether the module's own `to` takes it to a device and back.
        may_be_grouped: Whether diffusers' group offload moves it.
    """

    reason: str
    remedy: str = "take preset resident"
    may_be_resident: bool = True
    may_be_grouped: bool = False


def find_obstacle_in(weight: Tensor) -> Obstacle | None:
    """Why a weight cannot move as bytes; None if it can."""
    if is_plain(weight):
        return None
    name = class_name(weight)
    if name in _BOUND_TO_DEVICE:
        return Obstacle(f"a {name}, packed for the device that it is on")
    if is_wrapper(weight):
        opaque = [class_name(t) for t in _leaves(weight) if not is_plain(t)]
        reason = f"a {name} around a {opaque[0]}, more than its bytes" if opaque else ""
        is_known_to_diffusers = _library(weight) == "torchao"
        return Obstacle(reason, may_be_grouped=is_known_to_diffusers) if opaque else None
    if name not in _WITH_MEMORY:
        return Obstacle(f"a {name}, more than its bytes", may_be_grouped=True)
    if _library(weight) == "bitsandbytes":
        return _find_obstacle_in_bitsandbytes(weight)
    return None


def _find_obstacle_in_bitsandbytes(weight: Tensor) -> Obstacle | None:
    name = class_name(weight)
    if getattr(vars(weight).get("quant_state"), "packing_format_for_cpu", False):
        return Obstacle(
            f"a {name}, packed for this CPU by a call here",
            "load it again, and call it while attached only",
            may_be_resident=False,
        )
    if not vars(weight).get("bnb_quantized", not weight.is_floating_point()):
        return Obstacle(
            f"a {name} that is not quantized yet",
            "move the module to its device and back once, which quantizes it",
            may_be_resident=False,
        )
    return None


def is_left_behind_by_groups(weight: Tensor) -> bool:
    """Whether diffusers' group offload moves a weight without the tensors that belong to it.

    It exchanges `data`, and the tensors inside of torchao's classes.
    """
    if is_wrapper(weight):
        return _library(weight) != "torchao"
    return _library(weight) == "bitsandbytes"


def class_name(tensor: object) -> str:
    """Library and class, such as `torchao.Int8Tensor`."""
    return f"{_library(tensor)}.{type(tensor).__name__}"


def is_wrapper(tensor: Tensor) -> bool:
    """Whether all memory of a tensor is that of tensors inside of it."""
    return hasattr(tensor, "__tensor_flatten__")


def inner_tensors(weight: Tensor, module: nn.Module) -> list[Inner]:
    """The plain tensors of a weight that `find_obstacle_in` finds nothing in.

    Args:
        module: Whose parameter it is; libraries keep tensors there as well.
    """
    if is_plain(weight):
        return [Inner("", (weight,))]
    if is_wrapper(weight):
        named = list(_flatten(weight, ""))
    else:
        named = [("", weight), *_attributes(weight, module)]
    together: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for path, tensor in named:
        key = (tensor.data_ptr() or id(tensor), tensor.dtype, tuple(tensor.shape))
        together.setdefault(key, []).append((path, tensor))
    return [Inner(same[0][0], tuple(tensor for _, tensor in same)) for same in together.values()]


def plain_data(tensor: Tensor) -> Tensor:
    """A tensor's data without its class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data


def give_back(tensor: Tensor, found: Tensor) -> None:
    """Let a tensor have the data that it had, whatever another one has moved it to.

    Args:
        found: Its `data` of that time.
    """
    if not (is_wrapper(tensor) or is_wrapper(found)):
        if tensor.data_ptr() != found.data_ptr():
            tensor.data = found
    elif _addresses(tensor) != _addresses(found):
        # Torch moves a wrapper by exchanging all there is between two objects; so do we.
        requires_grad = tensor.requires_grad
        other = nn.Parameter(found, requires_grad=requires_grad)
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _addresses(tensor: Tensor) -> list[int]:
    return [leaf.data_ptr() for leaf in _leaves(tensor)]


class Shell:
    """A wrapper's own record of its device, which the tensors inside of it do not change.

    The object stays the same one; what torch notes of it is exchanged. Inner wrappers come
    before those around them.
    """

    def __init__(self, wrapper: Tensor) -> None:
        self._wrapper = wrapper
        self._found = _record_of(wrapper)
        self._placed: Tensor | None = None

    def place(self) -> None:
        """Let it be on the device of its tensors, which are there by now."""
        if self._placed is None:
            self._placed = _record_of(self._wrapper)
        self._wrapper.data = self._placed

    def restore(self) -> None:
        """Let it be where it was found."""
        self._wrapper.data = self._found


def shells(weight: Tensor) -> list[Shell]:
    """Shells of a weight and of wrappers inside of it; none for one that has memory."""
    if not is_wrapper(weight):
        return []
    inner, _ = _parts(weight)
    return [shell for name in inner for shell in shells(getattr(weight, name))] + [Shell(weight)]


def _record_of(wrapper: Tensor) -> Tensor:
    """Another wrapper of the same tensors."""
    names, context = _parts(wrapper)
    inner = {name: getattr(wrapper, name) for name in names}
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        kind: Any = type(wrapper)
        made: Tensor = kind.__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())
        return made


def _parts(wrapper: Any) -> tuple[list[str], Any]:
    names, context = wrapper.__tensor_flatten__()
    return list(names), context


def _flatten(tensor: Tensor, path: str) -> Iterator[tuple[str, Tensor]]:
    if not is_wrapper(tensor):
        yield path, tensor
        return
    for name in _parts(tensor)[0]:
        yield from _flatten(getattr(tensor, name), f"{path}.{name}" if path else name)


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    return (leaf for _, leaf in _flatten(tensor, ""))


def _attributes(weight: Tensor, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a weight, and a module of the same library, hold outside of torch's tables."""
    library = _library(weight)
    seen: set[int] = {id(weight)}
    yield from _held(vars(weight), "", library, seen)
    if _library(module) == library:
        held = {k: v for k, v in vars(module).items() if k not in _TABLES}
        yield from _held(held, "", library, seen)


_TABLES = frozenset(vars(nn.Module()))


def _held(
    values: dict[str, Any], path: str, library: str, seen: set[int]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if id(value) in seen or isinstance(value, nn.Module):
            continue
        where = f"{path}.{name}" if path else name
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield where, value
        elif _library(value) == library and hasattr(value, "__dict__"):
            seen.add(id(value))
            yield from _held(vars(value), where, library, seen)


def _library(thing: object) -> str:
    parts = type(thing).__module__.split(".")
    return ".".join(parts[: 2 if parts[0] in _NAMESPACES else 1])

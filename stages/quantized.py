"""Quantized weights: who quantized them, what their files call them. This module loads no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from stages.errors import DependencyError, ModelError, RequestError

if TYPE_CHECKING:
    from stages.models import ModelDirectory

GGUF = "gguf"
LIBRARIES = {
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    GGUF: ("gguf", "gguf"),
    "torchao": ("torchao", "torchao"),
}
"""By the name that a configuration gives: the module, and the package that brings it."""

ON_GPU = "bitsandbytes"

REFUSED = {
    "quanto": "diffusers 0.42 saves such a folder but leaves its weights empty when it loads it",
}
"""What the libraries name but cannot load, with the reason."""

_NUMBERS_OF_A_WEIGHT = re.compile(
    r"(?:^|[._])(?:scale|zero_point|qdata|absmax|quant_map|quant_state|nested_\w+|SCB"
    r"|weight_format|input_scale|output_scale)(?:[._]|$)"
)


def quant_method(config: Mapping[str, Any]) -> str | None:
    """The quantizer that a component's configuration names; None for plain weights."""
    told = config.get("quantization_config")
    if not isinstance(told, Mapping):
        return None
    return str(told.get("quant_method", "unknown"))


def require_quantizer(method: str, where: str) -> None:
    """Make sure that weights of this kind can be loaded here.

    Raises:
        ModelError: Nothing here knows the quantizer.
        DependencyError: Its library is not installed.
    """
    if method in REFUSED:
        raise ModelError(
            f"{where} was quantized by {method}: {REFUSED[method]}; take weights that were "
            f"quantized by {', '.join(sorted(LIBRARIES))}, or plain ones"
        )
    if method not in LIBRARIES:
        raise ModelError(
            f"{where} was quantized by {method!r}, allowed are {', '.join(sorted(LIBRARIES))}; "
            "take other weights of this model"
        )
    module, package = LIBRARIES[method]
    if importlib.util.find_spec(module) is None:
        raise DependencyError(
            f"{where} was quantized by {method}, but {package} is not installed; "
            f"pip install {package}"
        )


def require_device_of(model: ModelDirectory, device: str) -> None:
    """Refuse weights that diffusers loads on a GPU only, for a run on the CPU.

    Raises:
        RequestError: With the component.
    """
    for name, part in model.components.items():
        if device == "cpu" and part.library == "diffusers" and part.quant_method == ON_GPU:
            raise RequestError(
                f"component {name!r} was quantized by {ON_GPU}, which diffusers loads on a GPU "
                "only, but device is cpu; give device cuda, or weights of another kind"
            )


def quantizer_versions(methods: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that compute with weights of these kinds."""
    packages = {LIBRARIES[method][1] for method in methods if method in LIBRARIES}
    return {package: metadata.version(package) for package in sorted(packages)}


def is_of_a_weight(name: str) -> bool:
    """Whether a tensor only tells how to read a quantized one."""
    return _NUMBERS_OF_A_WEIGHT.search(name) is not None


def absent_and_strange(
    expected: Iterable[str], found: Iterable[str]
) -> tuple[list[str], list[str]]:
    """Of a quantized component the weights that no file has, and the tensors of no layer.

    Each library packs a weight in a way of its own, but under a name that tells which it was.
    """
    wanted, held = list(expected), list(found)
    layers = {name.rpartition(".")[0] for name in wanted}
    starts = {part for name in held for part in _starts(name)}
    absent = [name for name in wanted if name not in starts]
    strange = [name for name in held if not any(s in layers for s in _parents(name))]
    return absent, strange


def _starts(name: str) -> Iterable[str]:
    """The weights that a tensor may be a part of: `a.weight` of `a._weight_qdata`, and the like."""
    yield name
    yield from _parents(name)
    layer, _, last = name.rpartition(".")
    if last.startswith("_") and "_" in last[1:]:
        yield f"{layer}.{last[1:].split('_')[0]}"


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts))]

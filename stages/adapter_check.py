"""Whether a LoRA file fits a model, found out from configurations before any weights load.

Its factors are read, for the library's converters compute with some of them; the models that
would wear them are built on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stages.adapters import LoraState, loadable_modules, lora_loader, prefixes
from stages.contracts import AdapterUse
from stages.errors import DependencyError, RequestError
from stages.families import Family
from stages.lora_files import require_peft
from stages.manifest import AdapterFacts
from stages.meta_models import built_on_meta
from stages.model_component import Component
from stages.safetensors_header import read_header

_NAMED = 3  # tensors named in an error


def check_adapter(
    family: Family, components: Mapping[str, Component], use: AdapterUse, path: Path
) -> AdapterFacts:
    """The components that a LoRA file changes.

    Raises:
        RequestError: The family has no LoRA loader, the named component takes none, or the file
            is of another family or size.
        DependencyError: peft is missing or too old.
    """
    _require_library()
    loader = lora_loader(family)
    if loader is None:
        raise RequestError(f"{family.name} takes no lora: diffusers has no loader for it")
    loadable = [name for name in loadable_modules(loader) if name in components]
    if use.target and use.target not in loadable:
        raise RequestError(
            f"lora names component {use.target!r}, but those of {family.name} that take one "
            f"are {', '.join(loadable)}"
        )
    unet = _config_of(components.get("unet"))
    state = LoraState(loader, path, unet)
    wearers = prefixes(use, loadable)
    known = {name for prefix in wearers.values() for name in state.tensors if _is_in(name, prefix)}
    if strange := [name for name in state.tensors if name not in known]:
        raise RequestError(
            f"lora {path} has {len(strange)} of {len(state.tensors)} tensors that are of no part "
            f"of {family.name} that takes one ({', '.join(wearers)}): {_some(strange)}; it is "
            "of another family"
        )
    _require_none_dropped(path, state, loadable)
    touched: list[str] = []
    for component, prefix in wearers.items():
        if tensors := state.named(prefix):
            _check_fit(path, components[component], tensors)
            touched.append(component)
    return AdapterFacts(components=tuple(sorted(touched)))


def _require_library() -> None:
    require_peft()
    from diffusers.utils import USE_PEFT_BACKEND

    if not USE_PEFT_BACKEND:
        raise DependencyError("lora needs a newer peft; pip install -U 'exeunt[adapters]'")


def _require_none_dropped(path: Path, state: LoraState, loadable: list[str]) -> None:
    """Refuse a file of which a converter drops the part of a whole model without a word."""
    for name in read_header(path).tensors:
        first = name.partition(".")[0]
        meant = [each for each in loadable if each == first]
        if name.startswith("lora_te"):
            meant = [each for each in loadable if each.startswith("text_encoder")]
        if meant and not any(state.named(each) for each in meant):
            raise RequestError(
                f"lora {path} has tensors for {' or '.join(meant)}, such as {name!r}, which "
                "diffusers' loader would leave out; convert them to the names of diffusers, or "
                "remove them"
            )


def _is_in(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}.")


def _config_of(part: Component | None) -> Any:
    """A component's configuration as the converters read it."""
    return None if part is None else built_on_meta(part).config


def _check_fit(path: Path, part: Component, tensors: Mapping[str, torch.Tensor]) -> None:
    module = built_on_meta(part)
    layers = dict(module.named_modules())
    for name, tensor in _as_peft_names(path, part, module, tensors).items():
        layer_name, _, factor = name.partition(".lora_")
        layer = layers.get(layer_name)
        where = f"lora {path}, tensor {name!r}"
        if not factor or layer is None:
            raise RequestError(
                f"{where}: {part.name} ({part.class_name}) has no layer {layer_name!r}; the file "
                "is of another family or size"
            )
        expected = _expected(layer, factor, tensor)
        if expected is None:
            raise RequestError(
                f"{where}: layer {layer_name!r} of {part.name} is a {type(layer).__name__}, which "
                "takes no LoRA; the file is of another family"
            )
        if tuple(tensor.shape) != expected:
            raise RequestError(
                f"{where} has shape {tuple(tensor.shape)}, but by its config.json {part.name} "
                f"({part.class_name}) takes {expected}; the file is of a model of another size"
            )


def _as_peft_names(
    path: Path, part: Component, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The names that the loader gives the tensors of one component."""
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    renamed: dict[str, torch.Tensor] = dict(tensors)
    if hasattr(module, "load_lora_adapter"):
        if "lora_A" not in next(iter(renamed)):
            renamed = convert_unet_state_dict_to_peft(renamed)
        return renamed
    try:
        renamed = convert_state_dict_to_peft(convert_state_dict_to_diffusers(renamed))
    except ValueError as error:
        raise RequestError(
            f"lora {path} names layers of {part.name} in a way that diffusers does not know, such "
            f"as {next(iter(tensors))!r}; convert it to the names of diffusers"
        ) from error
    if not hasattr(module, "text_model"):
        renamed = {name.removeprefix("text_model."): each for name, each in renamed.items()}
    return renamed


def _expected(layer: torch.nn.Module, factor: str, tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The shape that a factor of this rank has for a layer; None where it takes none.

    Args:
        factor: What follows `lora_` in the name, such as `A.weight`.
    """
    weight = getattr(layer, "weight", None)
    if weight is None or weight.ndim not in (2, 4, 5) or tensor.ndim < 1:
        return None
    num_out, num_in, *kernel = weight.shape
    match factor:
        case "A.weight":
            return (tensor.shape[0], num_in, *kernel)
        case "B.weight" if tensor.ndim > 1:
            return (num_out, tensor.shape[1], *(1 for _ in kernel))
        case "B.bias":
            return (num_out,)
    return None


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and more"

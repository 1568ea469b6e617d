"""Single weight files: the whole of a component in one file, perhaps in another project's names.

diffusers converts the names while it loads, by a function for each class; the same function tells
what a file holds before its weights are read.
"""

from __future__ import annotations

from typing import Any

import torch

from stages.errors import ModelError
from stages.meta_models import class_of
from stages.model_component import Component


def load_single_file(part: Component, dtype: torch.dtype) -> Any:
    """A component from a single file, by diffusers' own loader, on the CPU.

    Weights of a GGUF file stay packed; each layer unpacks its own, to compute in `dtype`.

    Raises:
        ModelError: It did not load.
    """
    options: dict[str, Any] = {"config": str(part.directory), "dtype": dtype}
    if part.gguf is not None:
        from diffusers import GGUFQuantizationConfig

        options["quantization_config"] = GGUFQuantizationConfig(compute_dtype=dtype)
    try:
        return class_of(part).from_single_file(
            str(part.single_file), local_files_only=True, **options
        )
    except (ValueError, KeyError, RuntimeError, OSError, ImportError) as error:
        raise ModelError(
            f"component {part.name!r} did not load from {part.single_file}: "
            f"{type(error).__name__}: {error}; is it of another model?"
        ) from error


def shapes_in_layout(part: Component, module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a component's files, by the names of diffusers' layout.

    Args:
        module: The component on the meta device.

    Raises:
        ModelError: A single file is of a class or layout that has no conversion.
    """
    shapes = part.tensor_shapes()
    if part.single_file is None or set(shapes) == set(module.state_dict()):
        return shapes
    convert = _conversion(part)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        made = convert(config=dict(_config(module)), checkpoint=tensors)
    except (ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"{part.single_file} has neither the names of a {part.class_name} nor those that "
            f"diffusers converts to it: {type(error).__name__}: {error}; it is of another model"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _config(module: torch.nn.Module) -> Any:
    return module.config


def _conversion(part: Component) -> Any:
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    kind = class_of(part)
    for name, each in SINGLE_FILE_LOADABLE_CLASSES.items():
        if issubclass(kind, getattr(diffusers, name)):
            return each["checkpoint_mapping_fn"]
    raise ModelError(
        f"component {part.name!r} ({part.class_name}) is not read from a single file: "
        f"{part.single_file}; give a folder with its config.json"
    )

"""Build a module from its configuration alone, and bind the weights to it by name.

A library's own loader makes a tensor of each weight and puts one after the other into the
module. Where it would neither rename nor convert anything, the result is the same as that of
building on `meta` and binding file bytes, which takes a fraction of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddo.phases import Phases
from ddo.source import associate, every_tensor_is_stored, materialize, torch_dtype
from ddo.weight_files import DTYPE_BITS, SourceError, WeightFiles

_patching = threading.Lock()


def build_from_config(
    model_class: Any, directory: Path, files: WeightFiles, dtype: torch.dtype | None, setup: Phases
) -> nn.Module | None:
    """The module as the class's `from_pretrained` makes it; None where only that will do.

    For classes with `load_config` and `from_config`, whose tensors all lie in the files under
    the module's own names and in the dtypes that the module is to have.

    Args:
        dtype: What the module's weights are to be in; None takes torch's default.
        setup: Gets the phases `build` and `associate`.
    """
    if not (hasattr(model_class, "load_config") and hasattr(model_class, "from_config")):
        return None
    if dtype is None or not _keeps_dtypes(model_class, files, dtype):
        return None
    with setup.phase("build"):
        config = model_class.load_config(directory, local_files_only=True)
        if config.get("quantization_config") is not None:
            return None
        with _default_dtype(dtype), weights_on_meta():
            module = model_class.from_config(config)
        if not isinstance(module, nn.Module):
            return None
    with setup.phase("associate"):
        try:
            found = associate(module, files)
        except SourceError:
            return None  # the library may know these by other names, and says so if it does not
        if not every_tensor_is_stored(module, found):
            return None
        materialize(module, files, found)
        module.register_to_config(_name_or_path=directory)  # type: ignore[operator]
    return module


def _keeps_dtypes(model_class: Any, files: WeightFiles, dtype: torch.dtype) -> bool:
    """Whether the library would convert no tensor."""
    fp32 = getattr(model_class, "_keep_in_fp32_modules", None) or []
    kept = {fp32} if isinstance(fp32, str) else set(fp32)
    for name, tensor in files.tensors.items():
        stored = torch_dtype(tensor)
        if not stored.is_floating_point:
            continue
        wanted = dtype if kept.isdisjoint(name.split(".")) else torch.float32
        if stored != wanted or DTYPE_BITS[tensor.dtype] <= 8:
            return False
    return True


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tables that a module computes when it is made are in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Modules that are built inside have their parameters on `meta`; buffers keep their values.

    One thread at a time: torch's way to register a parameter is replaced meanwhile.
    """
    with _patching:
        register = nn.Module.register_parameter

        def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not param.is_meta:
                param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
            register(module, name, param)

        nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]

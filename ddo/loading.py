"""Load a component so that no weight is read before it is needed, and attach it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddo.attaching import attach_loaded
from ddo.building import build_from_config, weights_on_meta
from ddo.phases import Phases
from ddo.routes import Session
from ddo.settings import OffloadSettings
from ddo.source import associate, materialize, refuse_uninitialised, torch_dtype
from ddo.weight_files import DTYPE_BITS, SourceError, WeightFiles, read_weight_files, some


def load(
    model_class: Any,
    directory: str | Path,
    settings: OffloadSettings | None = None,
    *,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    build: Callable[[], nn.Module] | None = None,
    device: str | torch.device | None = None,
    **attach_options: Any,
) -> Session:
    """A component out of a directory, in evaluation mode and attached: `session.module`.

    Files are checked before anything is built. Weights stay mapped: loading reads no weight
    and takes no memory for one, unless `dtype` differs from the files'.

    Args:
        model_class: A class with `from_pretrained`, or any other together with `build`.
        dtype: None takes the dtype of most elements of the files.
        build: Makes the module; its weights are put on `meta` and then bound by name.
        attach_options: As for `attach`.

    Raises:
        SourceError: Files are missing or damaged, or do not hold exactly the module's weights.
        DdoError: See `attach`.
    """
    setup = Phases()
    with _garbage_left_alone():
        with setup.phase("read_headers"):
            files = read_weight_files(directory, variant)
        if build is not None:
            with setup.phase("build"), weights_on_meta():
                module = build()
            with setup.phase("associate"):
                materialize(module, files, associate(module, files))
        else:
            module = _load_whole(model_class, Path(directory), files, dtype, setup)
        refuse_uninitialised(module)
        module.eval().requires_grad_(False)
        return attach_loaded(module, settings, files, setup, device=device, **attach_options)


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """No collection of cycles: thousands of new objects, all of them kept, would start several.

    With a large library imported each takes 0.2 s, more than all the rest of loading.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load_whole(
    model_class: Any,
    directory: Path,
    files: WeightFiles,
    dtype: torch.dtype | None,
    setup: Phases,
) -> nn.Module:
    """The module as `from_pretrained` makes it, the short way where that is the same."""
    dtype = dtype or _main_dtype(files)
    module = build_from_config(model_class, directory, files, dtype, setup)
    if module is None:
        with setup.phase("build"):
            module = _from_pretrained(model_class, directory, files, dtype)
    return module


def _from_pretrained(
    model_class: Any, directory: Path, files: WeightFiles, dtype: torch.dtype | None
) -> nn.Module:
    module, info = model_class.from_pretrained(
        directory,
        dtype=dtype,
        variant=files.variant,
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = [
        f"{len(found)} {label}: {some(sorted(map(str, found)))}"
        for key, label in (
            ("missing_keys", "tensors are missing"),
            ("mismatched_keys", "tensors have another shape"),
            ("unexpected_keys", "tensors are left over"),
            ("error_msgs", "errors"),
        )
        if (found := info.get(key))
    ]
    if wrong:
        raise SourceError(
            f"weights do not fit {model_class.__name__}: {'; '.join(wrong)}: {directory}; check "
            "that configuration and weights belong together"
        )
    assert isinstance(module, nn.Module)
    return module


def _main_dtype(files: WeightFiles) -> torch.dtype | None:
    """The float dtype of most elements: any other would convert, and so copy, them."""
    count: Counter[torch.dtype] = Counter()
    for tensor in files.tensors.values():
        dtype = torch_dtype(tensor)
        if dtype.is_floating_point and DTYPE_BITS[tensor.dtype] > 8:
            count[dtype] += prod(tensor.shape)
    return count.most_common(1)[0][0] if count else None

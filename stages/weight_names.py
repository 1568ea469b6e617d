"""Names of tensors in weight files, as the libraries' loaders read them.

Files keep the names of the version that wrote them. transformers renames them while it loads,
by a table for each model class, and its classes say which names may be missing or left over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def loaded_names(module: Any, names: Iterable[str]) -> dict[str, str]:
    """What each name in a file is called in the module that it is loaded into.

    Args:
        module: A model of transformers, on any device; of other libraries, names stay.

    A tensor that is converted as well as renamed has the name of what it becomes a part of.
    """
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return {name: name for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    table = get_model_conversion_mapping(module)
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    state = module.state_dict()
    return {
        name: rename_source_key(name, renamings, converters, module.base_model_prefix, state)[0]
        for name in names
    }


def may_be_missing(module: Any, name: str) -> bool:
    """Whether a module gets this tensor from elsewhere if its files lack it."""
    return _is_excused(module, "_keys_to_ignore_on_load_missing", name)


def may_be_left_over(module: Any, name: str) -> bool:
    """Whether files of this module's class may hold this tensor though nothing reads it."""
    buffers = {key.rpartition(".")[2] for key, _ in module.named_buffers()}
    if (last := name.rpartition(".")[2]) in ("position_ids", "inv_freq") and last in buffers:
        return True  # written by older versions
    return _is_excused(module, "_keys_to_ignore_on_load_unexpected", name)


def shapes_as_loaded(
    module: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a component's files, by the names of its module."""
    names = loaded_names(module, shapes)
    return {names[name]: tuple(shape) for name, shape in shapes.items()}


def _is_excused(module: Any, attribute: str, name: str) -> bool:
    patterns = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns)

"""Models built from their configuration alone, on the meta device: no weights, no memory."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from stages.model_component import Component


def class_of(part: Component) -> Any:
    """The class that a component's model is of."""
    in_pipelines = part.library.partition(".")[0] not in ("diffusers", "transformers")
    home = f"diffusers.pipelines.{part.library}" if in_pipelines else part.library
    return getattr(importlib.import_module(home), part.class_name)


def built_on_meta(part: Component) -> nn.Module:
    """A component's model without weights."""
    from accelerate import init_empty_weights

    kind = class_of(part)
    with init_empty_weights():
        if hasattr(kind, "config_class"):  # of transformers, wherever it lies
            config = kind.config_class.from_pretrained(part.directory, local_files_only=True)
            built: nn.Module = kind(config)
        else:
            built = kind.from_config(kind.load_config(str(part.directory)))
    return built

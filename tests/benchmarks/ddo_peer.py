"""Offloaders of this package for other benchmarks: a directory and a cap in, a module out.

`module:function` names such as `tests.benchmarks.ddo_peer:stream` are called with the folder of
a diffusion transformer's weights and the GiB of device memory that it may use. What comes back
is ready for CUDA inputs.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tests.benchmarks.offloaders import offloader


def stream(weights_dir: str, cap_gib: float) -> Any:
    """The default on a small card: residents and ring planned together."""
    return _attached("stream", weights_dir, cap_gib)


def low_memory(weights_dir: str, cap_gib: float) -> Any:
    """Everything streams through the smallest ring."""
    return _attached("low_memory", weights_dir, cap_gib)


def auto(weights_dir: str, cap_gib: float) -> Any:
    """What a user gets who says nothing."""
    return _attached("auto", weights_dir, cap_gib)


def _attached(name: str, weights_dir: str, cap_gib: float) -> Any:
    """The configuration names the class."""
    directory = Path(weights_dir)
    class_name = json.loads((directory / "config.json").read_text())["_class_name"]
    model_class = getattr(importlib.import_module("diffusers"), class_name)
    return offloader(name)(directory, model_class, cap_gib)

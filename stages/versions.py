"""What of this code and its libraries determines a stage's output; loads no torch."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

CODE_VERSIONS = {"inspect": "2", "encode": "1", "condition": "1", "denoise": "1", "decode": "1"}
"""Raised by hand when a stage's output changes for equal requests."""

DEFINING_LIBRARIES = ("diffusers", "transformers")
"""Libraries whose code defines the mathematics. torch is not among them: it computes what
they define, and its version is provenance like the device, kept in the stage's report."""


@lru_cache(maxsize=1)
def defining_versions() -> dict[str, str]:
    """Installed versions of the defining libraries, read without importing them."""
    return {name: metadata.version(name) for name in DEFINING_LIBRARIES}


def adapter_library_versions() -> dict[str, str]:
    """Versions of the libraries that add LoRA to a model."""
    return {"peft": metadata.version("peft")}

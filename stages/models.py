"""Model directories in the diffusers layout: what they hold, checked before anything loads.

Only headers and small files are read here, except for fingerprints. This module loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.component_sources import open_source
from stages.contracts import json_digest
from stages.errors import ModelError, RequestError
from stages.hub_cache import HUB_ID, cached_snapshot
from stages.model_component import Component, is_component, open_component, refuse_auto_map
from stages.model_files import is_there, read_json

__all__ = ["MINIATURE", "Component", "ModelDirectory", "open_model", "resolve_model"]

INDEX_NAMES = ("modular_model_index.json", "model_index.json")
MINIATURE = Path(__file__).resolve().parent / "miniature" / "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """A checked model directory.

    Attributes:
        directory: Absolute.
        class_name: The pipeline's class, such as `ZImagePipeline`.
        is_modular: Described by `modular_model_index.json`.
        components: By name; absent optional components are left out.
        settings: What the index says beside its components, such as `boundary_ratio`.
        warnings: What the user should know, such as files that are not read.
        sources: Components that come from elsewhere, and from where.
    """

    directory: Path
    class_name: str
    is_modular: bool
    components: dict[str, Component]
    settings: dict[str, Any]
    warnings: tuple[str, ...]
    sources: Mapping[str, Path] = field(default_factory=dict)

    def origin(self, name: str) -> Path:
        """Where a component comes from, for messages."""
        return self.sources.get(name, self.directory)

    @property
    def index_digest(self) -> str:
        """sha256 over the pipeline's class, its settings and its components' classes."""
        return json_digest(
            {
                "class": self.class_name,
                "settings": self.settings,
                "components": {c.name: [c.library, c.class_name] for c in self.components.values()},
            }
        )


def resolve_model(name: str | Path) -> Path:
    """The absolute model directory that a name stands for; it need not exist.

    Args:
        name: `miniature` for the packaged model, a path with `~` expanded, or the hub id of a
            model in the cache.

    Raises:
        ModelError: The name is empty, or is a hub id that is neither a folder nor in the cache.
    """
    text = os.fspath(name)
    if text == "miniature":
        return MINIATURE
    if not text or "\0" in text:
        raise ModelError(f"model name {text!r} is no path; name a model directory")
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ModelError(f"model path {text!r} cannot be expanded: {error}") from error
    if HUB_ID.fullmatch(text) and not is_there(path):
        return cached_snapshot(text)
    return path


def open_model(
    directory: str | Path,
    *,
    variant: str | None = None,
    sources: Mapping[str, Path] | None = None,
) -> ModelDirectory:
    """Read a model's index, configurations and weight headers, and check them all.

    Args:
        directory: A path, or a name that `resolve_model` knows.
        variant: Which variant of the weights to take, such as `fp16`; None takes the files
            without one, or the only variant that a component has.
        sources: Component -> the folder or file that it comes from in place of its own.

    Raises:
        ModelError: Something is missing, incomplete, damaged, not allowed, or not a model;
            with the file, what was found and expected, and a remedy.
    """
    path = resolve_model(directory)
    try:
        return _open(path, variant, sources or {})
    except OSError as error:
        raise ModelError(
            f"cannot read {error.filename or path} as uid {os.geteuid()}: {error.strerror}"
        ) from error


def _open(path: Path, variant: str | None, sources: Mapping[str, Path]) -> ModelDirectory:
    index, is_modular = _read_index(path)
    blocks = path / "modular_config.json"
    if is_there(blocks):
        refuse_auto_map(read_json(blocks, "the block configuration"), blocks)
    components: dict[str, Component] = {}
    settings: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not is_component(entry):
            settings[name] = entry
        elif name in sources and all(entry[:2]):
            components[name] = open_source(path, name, entry, sources[name], variant)
        elif component := open_component(path, name, entry, variant):
            components[name] = component
    if strange := [name for name in sources if name not in components]:
        raise RequestError(
            f"component names {strange[0]!r}, but {path} has {', '.join(sorted(components))}"
        )
    if not components:
        raise ModelError(f"model index names no components: {path}; it is not a diffusion model")
    return ModelDirectory(
        directory=path,
        class_name=index["_class_name"],
        is_modular=is_modular,
        components=components,
        settings=settings,
        warnings=tuple(
            text for c in components.values() if c.weights for text in c.weights.warnings
        ),
        sources=dict(sources),
    )


def _read_index(path: Path) -> tuple[dict[str, Any], bool]:
    if not path.is_dir():
        if path.is_symlink():
            raise ModelError(f"model directory is a dangling link: {path} -> {path.readlink()}")
        if path.exists():
            raise ModelError(
                f"model is a file: {path}; give a model directory in diffusers layout, with a "
                f"{INDEX_NAMES[1]} in it, and the file as component, as in unet={path.name}"
            )
        raise ModelError(f"model directory is missing: {path}; check the path")
    for name in INDEX_NAMES:
        if is_there(path / name):
            index = read_json(path / name, "the model index")
            refuse_auto_map(index, path / name)
            if not isinstance(index.get("_class_name"), str):
                raise ModelError(
                    f"model index gives _class_name {index.get('_class_name')!r}, expected the "
                    f"name of a pipeline class: {path / name}; code of a model's own is refused"
                )
            return index, name == INDEX_NAMES[0]
    raise ModelError(f"no {INDEX_NAMES[1]} in {path}; give a model directory in diffusers layout")

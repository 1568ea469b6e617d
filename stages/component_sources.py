"""Components that come from elsewhere than the model: a folder, a single file, the hub's cache.

A component from elsewhere is of the class that the model's index names, and fits what stands
beside it as the model's own would. This module loads no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.errors import ModelError, RequestError
from stages.gguf_header import read_gguf_header
from stages.hub_cache import HUB_ID, cached_snapshot
from stages.model_component import Component, open_folder
from stages.model_files import (
    PICKLE_SUFFIXES,
    Weights,
    check_file,
    checked_header,
    is_there,
    read_json,
)
from stages.quantized import GGUF, require_quantizer

SINGLE_FILES = (".safetensors", f".{GGUF}")

INTERFACE = (
    *("in_channels", "out_channels", "patch_size", "latent_channels", "z_dim", "image_dim"),
    *("joint_attention_dim", "cross_attention_dim", "pooled_projection_dim", "text_dim"),
    *("caption_channels", "cap_feat_dim", "guidance_embeds", "text_embed_dim"),
    *("hidden_size", "d_model", "projection_dim", "vocab_size"),
    *("scale_factor_spatial", "scale_factor_temporal"),
)
"""Entries of a configuration that other components of a model go by."""

_GIVEN = re.compile(r"([a-z]\w*)=(.+)", re.DOTALL)


def choose_sources(given: str | Sequence[str] | None) -> dict[str, Path]:
    """Where components come from, by name.

    Args:
        given: Each `NAME=SOURCE`: a component's folder, a model's folder, a single file, or the
            hub id of a model in the cache, if wanted followed by a slash and a folder in it.

    Raises:
        RequestError: It has another form, or a component is named twice.
        ModelError: A hub id is not in the cache.
    """
    found: dict[str, Path] = {}
    for text in [given] if isinstance(given, str) else list(given or ()):
        match = _GIVEN.fullmatch(text)
        if match is None or "\0" in text:
            raise RequestError(f"component is {text!r}, expected NAME=SOURCE, such as vae=FOLDER")
        name, source = match.groups()
        if name in found:
            raise RequestError(f"component names {name!r} twice; give one source")
        found[name] = _resolve(source)
    return found


def _resolve(source: str) -> Path:
    path = Path(source).expanduser().absolute()
    parts = source.split("/", 2)
    hub_id = "/".join(parts[:2])
    if is_there(path) or not HUB_ID.fullmatch(hub_id) or path.suffix in SINGLE_FILES:
        return path
    return cached_snapshot(hub_id) / "/".join(parts[2:])


def open_source(
    model_dir: Path, name: str, entry: list[Any], source: Path, variant: str | None
) -> Component:
    """Check a component that comes from elsewhere.

    Args:
        entry: What the model's index says of it: library and class.

    Raises:
        ModelError: See `stages.models.open_model`; or it does not fit the model.
    """
    library, class_name = entry[:2]
    where = f"component {name!r} from {source}"
    own = model_dir / name
    about = (name, library, class_name)
    if source.suffix in PICKLE_SUFFIXES:
        raise ModelError(
            f"{where} is a pickle, which can run code when it is opened; convert it to safetensors"
        )
    if source.suffix in SINGLE_FILES and not source.is_dir():
        return _single_file(own, about, source, where)
    if not source.is_dir():
        check_file(source, where)
        raise ModelError(f"{where} is a file, expected a folder, .safetensors or .gguf")
    folder = source / name if (source / name).is_dir() else source
    found = open_folder(source, folder, about, variant, where)
    _require_fit(own, found, where)
    return found


def _single_file(own: Path, about: tuple[str, str, str], source: Path, where: str) -> Component:
    name, library, class_name = about
    check_file(source, where)
    config_file = own / "config.json"
    if library == "transformers":
        raise ModelError(
            f"{where} is a single file, which {class_name} of transformers does not read; give a "
            "folder with its config.json"
        )
    if not is_there(config_file):
        raise ModelError(
            f"{where} is a single file, which tells no configuration, and {config_file} is "
            "missing; fetch it"
        )
    read_json(config_file, f"the configuration of component {name!r}")
    gguf, weights = None, None
    if source.suffix == f".{GGUF}":
        require_quantizer(GGUF, where)
        gguf = read_gguf_header(source)
    else:
        headers = {source: checked_header(source)}
        weights = Weights(headers=headers, index_file=None, variant=None, warnings=())
    return Component(
        name=name,
        library=library,
        class_name=class_name,
        directory=own,
        config_file=config_file,
        weights=weights,
        other_files=(),
        single_file=source,
        gguf=gguf,
    )


def _require_fit(own: Path, found: Component, where: str) -> None:
    """Hold a component's configuration to that of the one in whose place it stands."""
    theirs = found.config()
    told = theirs.get("_class_name")
    if told is not None and told != found.class_name:
        raise ModelError(f"{where} is a {told}, but the model's {found.name} is {found.class_name}")
    if not is_there(own / found.config_file.name):
        return
    ours = read_json(own / found.config_file.name, f"the configuration of {found.name!r}")
    if (ours.get("model_type"), theirs.get("model_type")) != (theirs.get("model_type"),) * 2:
        raise ModelError(
            f"{where} is of type {theirs.get('model_type')!r}, but the model's {found.name} is "
            f"{ours.get('model_type')!r}"
        )
    for key in INTERFACE:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            raise ModelError(
                f"{where} has {key} {theirs[key]!r}, but the model's {found.name} has "
                f"{ours[key]!r}; it belongs to another model"
            )

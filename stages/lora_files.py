"""LoRA files as the user names them, checked by their headers. This module loads no torch."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stages.errors import DependencyError, ModelError, RequestError
from stages.model_files import PICKLE_SUFFIXES, check_file, is_there
from stages.models import ModelDirectory
from stages.safetensors_header import HeaderError, TensorInfo, read_header

PARTNERS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), (".down.", ".up."), ("_down.", "_up."))
"""What the two factors of a pair are called, the first one the one that narrows."""

OTHER_KINDS = {"dora_scale": "DoRA", "lokr_": "LoKr", "hada_": "LoHa", "oft_": "OFT"}
LORAS_LIMIT = 32
_TARGET = re.compile(r"([a-z]\w*)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A LoRA file that a run wears.

    Attributes:
        path: Absolute.
        scale: What its part is multiplied by.
        target: The component that the user named; empty for what the file's names say.
    """

    path: Path
    scale: float = 1.0
    target: str = ""

    @property
    def name(self) -> str:
        """For people, in settings and reports."""
        return f"{self.target}={self.path.stem}" if self.target else self.path.stem


def choose_loras(given: str | Sequence[str] | None) -> tuple[Lora, ...]:
    """The LoRA files that were asked for, in their order, each checked by its header.

    Args:
        given: Each `PATH`, `PATH:SCALE` or `COMPONENT=PATH:SCALE`; a folder stands for the one
            safetensors file in it.

    Raises:
        RequestError: A scale is not finite, a file is named twice for one component, is missing,
            damaged, a pickle, or holds no LoRA.
        DependencyError: The library that adds them to a model is not installed.
    """
    texts = [given] if isinstance(given, str) else list(given or ())
    if not texts:
        return ()
    if len(texts) > LORAS_LIMIT:
        raise RequestError(f"lora names {len(texts)} files, allowed are {LORAS_LIMIT}")
    found = tuple(_parse(text) for text in texts)
    for n, lora in enumerate(found):
        if (lora.path, lora.target) in [(each.path, each.target) for each in found[:n]]:
            raise RequestError(
                f"lora names {lora.path} twice; give it once, with the sum of scales"
            )
        check_lora_file(lora.path)
    require_peft()
    return found


def target_warnings(loras: Sequence[Lora], model: ModelDirectory) -> tuple[str, ...]:
    """Tells which of two transformers wears a file that names none.

    Raises:
        RequestError: A file names a component that the model does not have.
    """
    for lora in loras:
        if lora.target and lora.target not in model.components:
            raise RequestError(
                f"lora names component {lora.target!r}, but {model.directory.name} has "
                f"{', '.join(sorted(model.components))}"
            )
    if "transformer_2" not in model.components:
        return ()
    return tuple(
        f"lora {lora.path.name} is worn by transformer alone; name transformer or transformer_2 "
        f"before it, as in transformer_2={lora.path.name}"
        for lora in loras
        if not lora.target
    )


def require_peft() -> None:
    """Raise DependencyError where the library that adds LoRA to a model is missing."""
    if importlib.util.find_spec("peft") is None:
        raise DependencyError("lora needs the library peft; pip install 'exeunt[adapters]'")


def _parse(text: str) -> Lora:
    target, scale, rest = "", 1.0, text
    if not is_there(Path(rest)) and (match := _TARGET.fullmatch(rest)):
        target, rest = match[1], match[2]
    path, colon, last = rest.rpartition(":")
    if colon and not is_there(Path(rest)):
        with suppress(ValueError):  # else a colon of the name
            scale, rest = float(last), path
    if not math.isfinite(scale):
        raise RequestError(f"lora scale is {last} in {text!r}, expected a finite number")
    if not rest or "\0" in rest:
        raise RequestError(f"lora {text!r} names no file; give PATH or PATH:SCALE")
    return Lora(path=_file(Path(rest).expanduser().absolute()), scale=scale, target=target)


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    names = sorted(each.name for each in path.iterdir() if each.suffix == ".safetensors")
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise RequestError(
            f"folder {path} holds {len(names)} safetensors files ({found}); name one"
        )
    return path / names[0]


def check_lora_file(path: Path) -> None:
    """Hold a file's header to what a LoRA is: pairs of factors that have one rank.

    Raises:
        RequestError: With what was found and what to do.
    """
    if path.suffix in PICKLE_SUFFIXES:
        raise RequestError(
            f"lora is a pickle, which can run code when it is opened: {path}; convert it to "
            "safetensors"
        )
    try:
        check_file(path, "lora")
        tensors = read_header(path).tensors
    except ModelError as error:  # a file that was asked for is no part of a model
        raise RequestError(str(error)) from error
    except HeaderError as error:
        raise RequestError(f"lora is not a whole safetensors file: {error}") from error
    for mark, kind in OTHER_KINDS.items():
        if named := [name for name in tensors if mark in name]:
            raise RequestError(
                f"lora is of the kind {kind}, which is not read in full: {named[0]!r} in {path}; "
                "convert it to plain LoRA"
            )
    narrowing = {name: _partner(name) for name in tensors if _partner(name)}
    if not narrowing:
        some = next(iter(tensors), "nothing")
        raise RequestError(
            f"lora holds no LoRA: none of its {len(tensors)} tensors is called like one, first "
            f"{some!r}: {path}; weights of a whole component go to the argument component"
        )
    _check_pairs(tensors, narrowing, path)


def _partner(name: str) -> str:
    """What the widening factor of a narrowing one is called; empty for all other names."""
    if "lora" not in name:
        return ""
    for down, up in PARTNERS:
        if down in name:
            return name.replace(down, up)
    return ""


def _check_pairs(
    tensors: Mapping[str, TensorInfo], narrowing: Mapping[str, str], path: Path
) -> None:
    widening = [name for name in tensors if _is_widening(name)]
    missing = [up for up in narrowing.values() if up not in tensors]
    missing += [name for name in widening if name not in narrowing.values()]
    if missing:
        raise RequestError(
            f"lora has {len(missing)} factors without the other one of their pair, first "
            f"{missing[0]!r}: {path}; fetch the file again"
        )
    for down, up in narrowing.items():
        narrow, wide = tensors[down].shape, tensors[up].shape
        if len(narrow) < 2 or len(wide) < 2 or narrow[0] != wide[1]:
            raise RequestError(
                f"lora pair {down!r} has shapes {narrow} and {wide}, expected (rank, in) and "
                f"(out, rank): {path}; fetch the file again"
            )


def _is_widening(name: str) -> bool:
    """Whether a name is that of a widening factor; a bias of one has none to narrow."""
    return "lora" in name and name.endswith(".weight") and any(up in name for _, up in PARTNERS)

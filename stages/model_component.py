"""One component of a model directory: its configuration, its weights, its fingerprint."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from stages.contracts import json_digest
from stages.errors import ModelError
from stages.fingerprints import Progress, file_sha256
from stages.gguf_header import GgufHeader
from stages.model_files import (
    PICKLE_SUFFIXES,
    Weights,
    check_file,
    find_weights,
    is_there,
    read_json,
)
from stages.quantized import GGUF, is_of_a_weight, quant_method, require_quantizer
from stages.safetensors_header import TORCH_DTYPES, Header

_TORCH_FLOATS = {code: name for name, code in TORCH_DTYPES.items() if code.startswith(("F", "BF"))}
_CONFIG_NAMES = (
    (r"Tokenizer(Fast)?|TokenizersBackend", ("tokenizer_config.json",)),
    (r"Scheduler", ("scheduler_config.json",)),
    (r"Guidance|Guider", ("guider_config.json",)),
    (
        r"Processor(Fast|Pil)?|FeatureExtractor",
        ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json"),
    ),
)
_NO_DATA = re.compile(r"\..*|.*\.(md|py)|LICENSE.*", re.IGNORECASE)
_OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|msgpack|h5|onnx|onnx_data|pb|index\.json|index\.[\w-]+\.json)"
    r"|.*(" + "|".join(re.escape(suffix) for suffix in PICKLE_SUFFIXES) + ")",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of a model: a folder with a configuration, and weights if it has any.

    Attributes:
        name: As in the model's index, such as `text_encoder`.
        library: `diffusers`, `transformers`, or a pipeline folder of diffusers.
        class_name: Such as `Qwen3Model`.
        directory: The component's folder, absolute.
        config_file: The configuration that its class reads.
        weights: None for tokenizers, schedulers and the like.
        other_files: The further files that its class may read, such as a vocabulary.
        single_file: A weight file that lies elsewhere, perhaps with the names of another layout.
        gguf: What that file holds, if it is of the kind GGUF.
    """

    name: str
    library: str
    class_name: str
    directory: Path
    config_file: Path
    weights: Weights | None
    other_files: tuple[Path, ...]
    single_file: Path | None = None
    gguf: GgufHeader | None = None

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold its tensors, in the order of their names."""
        if self.single_file is not None:
            return (self.single_file,)
        return tuple(self.weights.headers) if self.weights else ()

    @property
    def quant_method(self) -> str | None:
        """The quantizer that its weights are of, such as `torchao`; None for plain ones."""
        if self.gguf is not None:
            return GGUF
        return quant_method(self.config()) if self.weights else None

    @property
    def variant(self) -> str | None:
        """What the loader must be told to find these files, such as `fp16`."""
        return self.weights.variant if self.weights else None

    @property
    def headers(self) -> dict[Path, Header]:
        """The checked header of each weight file."""
        return self.weights.headers if self.weights else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, as stored."""
        if self.gguf is not None:
            return self.gguf.nbytes
        return sum(info.nbytes for h in self.headers.values() for info in h.tensors.values())

    def config(self) -> dict[str, Any]:
        """The configuration, as plain JSON."""
        return read_json(self.config_file, f"the configuration of component {self.name!r}")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in its weight files, by name."""
        if self.gguf is not None:
            return dict(self.gguf.shapes)
        return {
            name: info.shape
            for header in self.headers.values()
            for name, info in header.tensors.items()
        }

    @property
    def file_dtype(self) -> str | None:
        """The float dtype of most of its elements by torch's name; None without floats.

        Of quantized weights, that of what was not quantized; `gguf` for a file of that kind.
        """
        if self.gguf is not None:
            return GGUF
        count: Counter[str] = Counter()
        for header in self.headers.values():
            for name, info in header.tensors.items():
                if info.dtype in _TORCH_FLOATS and not is_of_a_weight(name):
                    count[info.dtype] += prod(info.shape)
        return _TORCH_FLOATS[count.most_common(1)[0][0]] if count else None

    @property
    def config_digest(self) -> str:
        """sha256 over the class and the bytes of its configuration, 64 hex digits."""
        return json_digest(
            {
                "class": [self.library, self.class_name],
                "config": hashlib.sha256(self.config_file.read_bytes()).hexdigest(),
            }
        )

    @property
    def header_digest(self) -> str:
        """sha256 over the headers of its weight files: names, shapes, dtypes, no values."""
        if self.gguf is not None:
            return self.gguf.digest
        headers = self.headers.items()
        return json_digest(
            {path.name: hashlib.sha256(header.raw).hexdigest() for path, header in headers}
        )

    def fingerprint(
        self,
        home_dir: str | Path,
        *,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> str:
        """sha256 over its class and the full content of all its files, 64 hex digits.

        Independent of where the model lies. Checksums of files are remembered in `home_dir`
        and computed anew when a file's size, times, inode or device differ.

        Args:
            verify: Read every file again.
            progress: Called with bytes done and bytes in all, for each file that is read.

        Raises:
            ModelError: A file cannot be read, or changed meanwhile.

        Blocks on reading all weights the first time.
        """
        files = [self.config_file, *self.other_files, *self.weight_files]
        if self.weights and self.weights.index_file:
            files.append(self.weights.index_file)
        home = Path(home_dir)
        return json_digest(
            {
                "class": [self.library, self.class_name],
                "files": {
                    self._role(path): file_sha256(path, home, verify=verify, progress=progress)
                    for path in files
                },
            }
        )

    def _role(self, path: Path) -> str:
        """What a file is to the component, wherever it lies."""
        if path == self.single_file:
            return f"single file{path.suffix}"
        return path.relative_to(self.directory).as_posix()


def is_component(entry: Any) -> bool:
    """Whether a value of a model index describes a component: library, class, where from."""
    return (
        isinstance(entry, list)
        and len(entry) in (2, 3)
        and all(part is None or isinstance(part, str) for part in entry[:2])
    )


def open_component(
    model_dir: Path, name: str, entry: list[Any], variant: str | None
) -> Component | None:
    """Check one component of a model index; None if the index gives it no files.

    Raises:
        ModelError: See `open_model`.
    """
    library, class_name = entry[:2]
    origin = entry[2] if len(entry) == 3 and isinstance(entry[2], dict) else None
    if not library or not class_name:
        return None
    if origin is not None and not origin.get("pretrained_model_name_or_path"):
        return None  # made from its defaults, such as a guider
    where = f"component {name!r} of {model_dir}"
    subfolder = (origin or {}).get("subfolder") or name
    if not isinstance(subfolder, str) or subfolder != Path(subfolder).name or subfolder == "..":
        raise ModelError(f"{where} lies in {subfolder!r}, which leads out of its model")
    folder = model_dir / subfolder
    if not folder.is_dir():
        _refuse_own_code(model_dir, folder, library, class_name, where)
        found = f" -> {folder.readlink()}" if folder.is_symlink() else ""
        raise ModelError(
            f"folder of {where} is missing: {folder}{found}; components outside of the model "
            "directory are not read, fetch the whole model"
        )
    return open_folder(model_dir, folder, (name, library, class_name), variant, where)


def open_folder(
    model_dir: Path, folder: Path, about: tuple[str, str, str], variant: str | None, where: str
) -> Component:
    """Check a component's folder.

    Args:
        about: Name, library and class.
        where: The component, for messages.

    Raises:
        ModelError: See `stages.models.open_model`.
    """
    name, library, class_name = about
    _refuse_own_code(model_dir, folder, library, class_name, where)
    config_file, has_weights = _find_config(folder, class_name, where)
    config = read_json(config_file, f"the configuration of {where}")
    refuse_auto_map(config, config_file)
    weights = find_weights(folder, library, variant) if has_weights else None
    if weights is not None and (method := quant_method(config)) is not None:
        require_quantizer(method, where)
    others = tuple(p for p in _other_files(folder, has_weights=has_weights) if p != config_file)
    for path in others:
        check_file(path, f"a file of {where}")
        if path.name.endswith("config.json"):
            refuse_auto_map(read_json(path, f"a file of {where}"), path)
    return Component(
        name=name,
        library=library,
        class_name=class_name,
        directory=folder,
        config_file=config_file,
        weights=weights,
        other_files=others,
    )


def _other_files(folder: Path, *, has_weights: bool) -> Iterator[Path]:
    """What a component's class may read beside its configuration and its weights."""
    for path in sorted(folder.rglob("*")):
        is_data = not _NO_DATA.fullmatch(path.name) and not path.is_dir()
        if is_data and not (has_weights and _OTHER_WEIGHTS.fullmatch(path.name)):
            yield path


def _find_config(folder: Path, class_name: str, where: str) -> tuple[Path, bool]:
    """A component's configuration file, and whether its class has weights."""
    for pattern, names in _CONFIG_NAMES:
        if re.search(rf"({pattern})$", class_name):
            for name in (*names, "config.json"):
                if is_there(folder / name):
                    return folder / name, False
            raise ModelError(
                f"configuration of {where} is missing: no {' or '.join(names)} in {folder}; "
                "fetch the model again"
            )
    path = folder / "config.json"
    if not is_there(path):
        raise ModelError(
            f"configuration of {where} is missing: no config.json in {folder}; "
            "fetch the model again"
        )
    return path, True


def _refuse_own_code(
    model_dir: Path, folder: Path, library: str, class_name: str, where: str
) -> None:
    module = library.rpartition(".")[2]
    for path in (model_dir / f"{module}.py", folder / f"{module}.py"):
        if is_there(path):
            raise ModelError(
                f"{where} wants class {class_name} out of the model's own code: {path}; "
                "code of a model's own is refused"
            )
    if library.partition(".")[0] not in ("diffusers", "transformers", *_pipeline_folders()):
        raise ModelError(
            f"{where} wants class {class_name} of library {library!r}, allowed are diffusers and "
            "transformers; code of a model's own is refused"
        )


def refuse_auto_map(config: dict[str, Any], path: Path) -> None:
    if config.get("auto_map"):
        raise ModelError(
            f"auto_map wants the model's own code to be run: {config['auto_map']!r} in {path}; "
            "code of a model's own is refused"
        )


@cache
def _pipeline_folders() -> frozenset[str]:
    """Folders of diffusers that a model index may name in place of the library."""
    spec = importlib.util.find_spec("diffusers")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent / "pipelines"
    return frozenset(p.name for p in folder.iterdir() if p.is_dir() and p.name != "__pycache__")

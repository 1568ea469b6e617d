"""A folder of custom blocks, read once: its code as text, and a digest over all of it.

Nothing is imported or executed here, and no torch is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stages.contracts import canonical_json
from stages.errors import ModelError

SCHEMA = "exeunt.blocks/1"
CONFIG_NAME = "modular_config.json"
ENTRY_KEY = "ModularPipelineBlocks"
MAX_NUM_FILES = 200
MAX_FILE_NBYTES = 2**20
_COMPILED = (".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".pyx", ".pth")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSources:
    """All the code of a folder of blocks.

    Attributes:
        entry: The class that is the block, as `module.Class` below the folder.
        files: Text of each Python file and of the configuration, by its path in the folder.
    """

    entry: str
    files: Mapping[str, str]

    @property
    def content(self) -> bytes:
        """The one byte string of these files: what a lock holds, and what is executed."""
        return canonical_json({"schema": SCHEMA, "entry": self.entry, "files": dict(self.files)})

    @property
    def digest(self) -> str:
        """sha256 of `content`, 64 hex digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def sha256_by_file(self) -> dict[str, str]:
        """sha256 of each file's bytes."""
        return {
            name: hashlib.sha256(text.encode("utf-8")).hexdigest()
            for name, text in self.files.items()
        }

    @property
    def modules(self) -> dict[str, str]:
        """The path of each module by its dotted name; a package is its `__init__.py`."""
        found = {}
        for name in self.files:
            path = PurePosixPath(name)
            if path.suffix == ".py":
                parts = path.with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found[".".join(parts)] = name
        return found

    def differences(self, other: BlockSources) -> list[str]:
        """What differs in these files from the other ones, in words; empty for none."""
        found = [f"{name} was added" for name in self.files if name not in other.files]
        found += [f"{name} was removed" for name in other.files if name not in self.files]
        found += [
            f"{name} was changed"
            for name, text in self.files.items()
            if other.files.get(name, text) != text
        ]
        return sorted(found)


def read_block_sources(directory: Path) -> BlockSources:
    """The code of a folder, each file read once.

    Python files and `modular_config.json` are read, hidden files and all others are not: what
    is not read cannot run. Links may not lead out of the folder.

    Raises:
        ModelError: The folder holds compiled code or a link that leads out, names its class in
            a way that leads elsewhere, or is no folder of blocks; with what was found.
    """
    try:
        root = directory.resolve(strict=True)
        files = {name: _text(path, name) for name, path in _code_files(root, directory)}
    except OSError as error:
        raise ModelError(
            f"cannot read blocks: {error.filename or directory}: {error.strerror}"
        ) from error
    return BlockSources(entry=_entry(files, directory), files=dict(sorted(files.items())))


def parse_block_sources(content: bytes, where: str) -> BlockSources:
    """The sources that a `content` is of.

    Raises:
        ModelError: It is none, or of a newer schema.
    """
    import json

    try:
        document: Any = json.loads(content)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, this version reads {SCHEMA!r}")
        found = BlockSources(entry=document["entry"], files=document["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where} holds no reviewed blocks: {error}; review them again") from error
    return found


def _code_files(root: Path, shown: Path) -> Iterator[tuple[str, Path]]:
    if not root.is_dir():
        raise ModelError(f"blocks are no folder: {shown}; give the folder with {CONFIG_NAME}")
    num_files = 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted([*subfolders, *names]):
            path = Path(folder, name)
            inside = path.relative_to(root).as_posix()
            if name.startswith("."):
                continue
            _refuse_what_hides_code(root, path, inside)
            if name in names and (path.suffix == ".py" or inside == CONFIG_NAME):
                num_files += 1
                if num_files > MAX_NUM_FILES:
                    raise ModelError(
                        f"blocks have over {MAX_NUM_FILES} files of code: {shown}; give the "
                        "folder of the blocks alone"
                    )
                yield inside, path


def _refuse_what_hides_code(root: Path, path: Path, inside: str) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise ModelError(
            f"{inside} is a link that leads out of {root}: {path.readlink()}; copy the folder "
            "with the files that its links lead to (cp -rL)"
        )
    if path.is_symlink() and path.is_dir():
        raise ModelError(f"{inside} is a link to a folder: {path}; put the folder itself there")
    if path.name == "__pycache__" or path.suffix.lower() in _COMPILED:
        raise ModelError(f"{inside} is compiled code, which nobody can review: {path}; remove it")


def _text(path: Path, inside: str) -> str:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{inside} is not a regular file: {path}")
        data = file.read(MAX_FILE_NBYTES + 1)
    if len(data) > MAX_FILE_NBYTES:
        raise ModelError(
            f"{inside} has over {MAX_FILE_NBYTES} bytes, too many to review: {path}; split it"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{inside} is not UTF-8: {path}: {error.reason}") from error


def _entry(files: Mapping[str, str], directory: Path) -> str:
    import json

    where = directory / CONFIG_NAME
    if CONFIG_NAME not in files:
        raise ModelError(
            f"no {CONFIG_NAME} in {directory}, which names the class of the blocks; give a folder "
            "that `save_pretrained` of diffusers' blocks has written"
        )
    try:
        auto_map = json.loads(files[CONFIG_NAME]).get("auto_map") or {}
        entry = auto_map.get(ENTRY_KEY)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{where} is not a JSON object of blocks: {error}") from error
    if not isinstance(entry, str) or not _ENTRY.fullmatch(entry):
        hint = "; code of another repository is never run" if "--" in str(entry) else ""
        raise ModelError(
            f"{where} gives {ENTRY_KEY} {entry!r} in its auto_map, expected module.Class of this "
            f"folder{hint}"
        )
    module = entry.rpartition(".")[0].replace(".", "/")
    if f"{module}.py" not in files and f"{module}/__init__.py" not in files:
        raise ModelError(f"{where} names {entry}, but there is no {module}.py beside it")
    return entry

"""Which files of a component's folder belong to it, each checked before anything loads."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import ModelError
from stages.safetensors_header import Header, HeaderError, read_header

BASE_NAMES = ("diffusion_pytorch_model", "model")
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
MAX_JSON_NBYTES = 64 * 2**20
_LFS = b"version https://git-lfs.github.com/spec/"
_NAMED = 5  # files or tensors named in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A component's weight files.

    Attributes:
        headers: Header of each file, in the order of the files' names.
        index_file: What assigns tensors to several files; None for a single file.
        variant: The part of the names that tells a variant, such as `fp16`.
        warnings: Texts about files that are not read.
    """

    headers: dict[Path, Header]
    index_file: Path | None
    variant: str | None
    warnings: tuple[str, ...]


def is_there(path: Path) -> bool:
    """Whether a name exists, be it a dangling link.

    Raises:
        OSError: Its folder may not be searched; that does not mean that the file is missing.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_file(path: Path, purpose: str) -> os.stat_result:
    """Make sure that a path leads to a readable file with content, through links.

    Args:
        purpose: What the file is, such as `the configuration`, for the message.

    Raises:
        ModelError: It is missing, a dangling link or a loop, no regular file, empty,
            unreadable, or a git-lfs pointer in place of the file.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{purpose} is not a regular file: {path}")
        with path.open("rb") as file:
            start = file.read(200)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ModelError(
                f"{purpose} is a dangling link: {path} -> {path.readlink()}; "
                "fetch the model again, with the files that its links lead to"
            ) from error
        raise ModelError(f"{purpose} is missing: {path}; fetch the model again") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ModelError(f"{purpose} is a link that leads to itself: {path}") from error
        raise ModelError(
            f"{purpose} cannot be read by uid {os.geteuid()}: {path}: {error.strerror}"
        ) from error
    if status.st_size == 0:
        raise ModelError(f"{purpose} is empty (0 bytes): {path}; incomplete download?")
    if start.startswith(_LFS):
        size = re.search(rb"^size ([0-9]+)", start, re.MULTILINE)
        expected = f" of {int(size[1])} bytes" if size else ""
        raise ModelError(
            f"{purpose} is a git-lfs pointer of {status.st_size} bytes, not the file{expected}: "
            f"{path}; run 'git lfs pull' in that folder"
        )
    return status


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """A JSON object out of a checked file.

    Raises:
        ModelError: See `check_file`; or it is not a JSON object in UTF-8.
    """
    size = check_file(path, purpose).st_size
    if size > MAX_JSON_NBYTES:
        raise ModelError(f"{purpose} has {size} bytes, {MAX_JSON_NBYTES} bytes are allowed: {path}")
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{purpose} is not JSON: {path}: {error}; fetch it again") from error
    if not isinstance(document, dict):
        raise ModelError(
            f"{purpose} holds a JSON {type(document).__name__}, expected an object: {path}"
        )
    return document


def find_weights(directory: Path, library: str, variant: str | None) -> Weights:
    """The weight files that the libraries would load, by their rules, with checked headers.

    Args:
        library: `transformers` reads a single file even where an index lies beside it,
            all others read the index first.
        variant: Which variant to take; None takes the files without one, or the only variant.

    Raises:
        ModelError: There are none, or they are incomplete, damaged, contradictory or pickles.
    """
    names = sorted(entry.name for entry in directory.iterdir())
    singles = {v: n for n in names if (v := _variant(n, r"\.safetensors")) is not None}
    indexes = {v: n for n in names if (v := _variant(n, r"\.safetensors\.index\.json")) is not None}
    chosen = _choose_variant(directory, names, {*singles, *indexes}, variant)
    single, index = singles.get(chosen), indexes.get(chosen)
    if index and single and library == "transformers":
        raise ModelError(
            f"both {single} and {index} lie in {directory}: transformers would read the first, "
            "which the index does not name; remove the one that does not belong there"
        )
    if index:
        headers = _sharded(directory / index)
    else:
        assert single is not None
        headers = {directory / single: checked_header(directory / single)}
    stray = [
        name
        for name in names
        if name.endswith(".safetensors")
        and directory / name not in headers
        and _is_of_variant(name, chosen)
    ]
    return Weights(
        headers=headers,
        index_file=directory / index if index else None,
        variant=chosen or None,
        warnings=tuple(
            f"{directory / name} is not read: it does not belong to {index or single}"
            for name in stray
        ),
    )


def _variant(name: str, suffix: str) -> str | None:
    """The variant in a weight file's name, empty for none; None for all other names."""
    for base in BASE_NAMES:
        for pattern in (rf"{base}{suffix}", rf"{base}\.([\w-]+?){suffix}"):
            if (match := re.fullmatch(pattern, name)) and "-of-" not in name:
                return match[1] if match.groups() else ""
        index = re.fullmatch(rf"{base}\.safetensors\.index\.([\w-]+)\.json", name)
        if index and "index" in suffix:
            return index[1]
    return None


def _is_of_variant(name: str, variant: str) -> bool:
    """Whether a stray file could be taken for a part of the chosen files."""
    return f".{variant}" in name if variant else True


def _choose_variant(directory: Path, names: list[str], found: set[str], variant: str | None) -> str:
    if variant is not None and variant in found:
        return variant
    if "" in found:  # the libraries, too, take the plain files where a variant is absent
        return ""
    if variant is None and len(found) == 1:
        return found.pop()
    if found:
        available = ", ".join(sorted(name or "(none)" for name in found))
        wanted = f"variant {variant!r} is" if variant else "several variants are"
        raise ModelError(
            f"{wanted} not unique or not present in {directory}: found {available}; "
            "name one of these as the variant"
        )
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        raise ModelError(
            f"weights are a pickle, which can run code when it is opened: "
            f"{directory / pickles[0]}; convert it to safetensors"
        )
    wanted = " or ".join(f"{base}.safetensors" for base in BASE_NAMES)
    raise ModelError(
        f"weights are missing: neither {wanted} nor their index lies in {directory}; "
        "fetch the model again"
    )


def _sharded(index_file: Path) -> dict[Path, Header]:
    """Headers of all shards, held to their index in both directions."""
    weight_map = read_json(index_file, "the shard index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"shard index has no weight_map: {index_file}; fetch it again")
    for shard in set(weight_map.values()):
        if not isinstance(shard, str) or not shard or shard != Path(shard).name:
            raise ModelError(
                f"shard index names a file outside its folder: {shard!r} in {index_file}"
            )
    shards = sorted(set(weight_map.values()))
    paths = {shard: index_file.with_name(shard) for shard in shards}
    if missing := [shard for shard in shards if not is_there(paths[shard])]:
        raise ModelError(
            f"{len(missing)} of {len(shards)} shards are missing: {_some(missing)}: {index_file}; "
            "fetch the model again"
        )
    headers = {shard: checked_header(paths[shard]) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard].tensors]
    if absent:
        raise ModelError(
            f"index promises {len(absent)} tensors that its shards do not hold: "
            f"{_some([f'{name} in {weight_map[name]}' for name in absent])}: {index_file}; "
            "index and shards belong to different models"
        )
    unlisted = [
        f"{name} in {shard}"
        for shard, header in headers.items()
        for name in header.tensors
        if weight_map.get(name) != shard
    ]
    if unlisted:
        raise ModelError(
            f"shards hold {len(unlisted)} tensors that their index does not list: "
            f"{_some(unlisted)}: {index_file}; the index is incomplete or of another model"
        )
    return {paths[shard]: headers[shard] for shard in shards}


def checked_header(path: Path) -> Header:
    """The header of a weight file, held to the file's size.

    Raises:
        ModelError: It is missing, damaged or incomplete.
    """
    check_file(path, "weight file")
    try:
        return read_header(path)
    except HeaderError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

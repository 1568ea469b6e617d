"""Reviewed blocks in the place of a family's own: one of them by its name, or all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.block_locks import WHOLE, read_lock
from stages.errors import ModelError, RequestError


def load_blocks(home: Path, digests: Mapping[str, str]) -> dict[str, Any]:
    """A block for each name, out of the code that was reviewed under its digest.

    Raises:
        ModelError: See `stages.block_modules.reviewed_class`.

    Executes that code.
    """
    if not digests:
        return {}
    from stages.block_modules import reviewed_class

    return {name: reviewed_class(home, digest)() for name, digest in digests.items()}


def describe_blocks(home: Path, digests: Mapping[str, str]) -> dict[str, Any]:
    """What is executed, for the stage's report: digests, the class, and each file's sha256."""
    found = {}
    for name, digest in digests.items():
        sources = read_lock(home, digest)
        files = sources.sha256_by_file
        found[name] = {"digest": digest, "entry": sources.entry, "files": files}
    return found


def with_custom(whole: Any, custom: Mapping[str, Any], triggers: Mapping[str, bool]) -> Any:
    """The blocks of one task with custom ones in the place of those that they are named after.

    Args:
        whole: The family's own blocks.
        custom: By the name of a resolved block, such as `denoise.denoise`, or of all under it,
            such as `denoise`; or all there are.
        triggers: The inputs that the task's blocks are chosen by.

    Raises:
        RequestError: There is no block of this name.
        ModelError: Blocks that are to be all there are have none called `denoise`.
    """
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    if WHOLE in custom:
        whole = custom[WHOLE]
        if not isinstance(whole, SequentialPipelineBlocks) or "denoise" not in whole.sub_blocks:
            raise ModelError(
                f"{type(whole).__name__} is to be a whole pipeline, but is no sequence of blocks "
                "with one called denoise; name the block that it stands in for, as in "
                "denoise.denoise=FOLDER"
            )
    leaves = dict(whole.get_execution_blocks(**triggers).sub_blocks)
    for name, block in custom.items():
        if name != WHOLE:
            leaves = _replaced(leaves, name, block)
    return SequentialPipelineBlocks.from_blocks_dict(leaves)


def _replaced(leaves: Mapping[str, Any], name: str, block: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for leaf, own in leaves.items():
        found |= {name: block} if _is_under(leaf, name) else {leaf: own}
    if name not in found:
        raise RequestError(
            f"there is no block {name!r} to put another one in its place; there are "
            f"{', '.join(leaves)}"
        )
    return found


def _is_under(leaf: str, name: str) -> bool:
    return leaf == name or leaf.startswith(f"{name}.")

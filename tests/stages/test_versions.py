"""A stage whose code changed either keeps its output or raises its code version.

The digests are of the code without docstrings and comments, in one layout.
After a change: if outputs for equal requests change, raise the stage in `CODE_VERSIONS`; then
write the new digests with `python -m tests.stages.test_versions`.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest

from stages.families import FAMILIES
from stages.versions import CODE_VERSIONS

STAGES = Path(__file__).resolve().parents[2] / "stages"
RECORDED = Path(__file__).with_name("code_digests.json")
SHARED = (
    *("execute", "phases", "components", "codec", "handover", "borders", "adapters"),
    "single_files",
    *("classic", "classic_signature", "classic_steps", "custom_blocks", "block_modules"),
    "families/family",
    *sorted(
        {where.partition(":")[0].split(".", 1)[1].replace(".", "/") for where in FAMILIES.values()}
    ),
)
SOURCES = {
    "inspect": ("inspect", "manifest", "weight_names", "meta_models", "adapter_check"),
    "encode": ("encode", "tokens"),
    "condition": ("condition",),
    "denoise": ("denoise", "loop", "latents", "checkpoints", "loop_state", "plain_values"),
    "decode": ("decode", "latents", "videos", "mp4"),
}


def code_digest(stage: str) -> str:
    """sha256 over the code of all that a stage's output comes from."""
    digest = hashlib.sha256()
    for name in (*SHARED, *SOURCES[stage]):
        tree = ast.parse((STAGES / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
                node, clean=False
            ):
                node.body = node.body[1:]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()


def current() -> dict[str, list[str]]:
    return {stage: [CODE_VERSIONS[stage], code_digest(stage)] for stage in sorted(SOURCES)}


@pytest.mark.parametrize("stage", sorted(SOURCES))
def test_changed_code_was_looked_at(stage: str) -> None:
    assert json.loads(RECORDED.read_text())[stage] == current()[stage], __doc__


def test_every_stage_with_a_version_is_watched() -> None:
    assert set(SOURCES) == set(CODE_VERSIONS)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(current(), indent=1) + "\n")

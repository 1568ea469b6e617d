"""Custom blocks run from reviewed bytes or not at all; a refusal says what differs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.block_inputs import inputs_of_phase, parse_block_inputs
from stages.block_locks import (
    FOLDER,
    chosen_blocks,
    forget,
    last_review,
    read_lock,
    require_reviewed,
    reviews,
    write_lock,
)
from stages.block_outline import COMPUTED, outline_entry, outline_file
from stages.block_sources import MAX_FILE_NBYTES, MAX_NUM_FILES, read_block_sources
from stages.errors import ModelError, RequestError
from stages.manifest import Manifest, PhaseFacts
from tests.support.custom_blocks import DAMPED, ENTRY, marker_line, write_blocks


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_blocks(tmp_path / "blocks")


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    return tmp_path / "home"


def review(locks: Path, blocks: Path) -> str:
    sources = read_block_sources(blocks)
    write_lock(locks, blocks, sources)
    return sources.digest


def test_a_lock_holds_the_reviewed_text_and_is_named_by_its_sha256(
    blocks: Path, locks: Path
) -> None:
    digest = review(locks, blocks)
    found = read_lock(locks, digest)
    assert found.entry == ENTRY
    assert found.files == {
        name: (blocks / name).read_text()
        for name in ("block.py", "math_of/damping.py", "modular_config.json")
    }
    assert require_reviewed(locks, blocks) == found


def test_a_digest_knows_content_and_no_place(blocks: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(blocks, tmp_path / "elsewhere"))
    (moved / "README.md").write_text("not read, not run")
    assert read_block_sources(moved).digest == read_block_sources(blocks).digest


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed file": (
        lambda d: (d / "block.py").write_text(DAMPED["block.py"] + "\n"),
        "block.py was changed",
    ),
    "an added file": (lambda d: (d / "extra.py").write_text(""), "extra.py was added"),
    "an added package": (
        lambda d: (d / "math_of" / "__init__.py").write_text(""),
        "math_of/__init__.py was added",
    ),
    "a removed file": (
        lambda d: (d / "math_of" / "damping.py").unlink(),
        "math_of/damping.py was removed",
    ),
    "a file under another name": (
        lambda d: (d / "math_of" / "damping.py").rename(d / "math_of" / "other.py"),
        "math_of/damping.py was removed, math_of/other.py was added",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_differs_is_refused_with_what_differs(
    blocks: Path, locks: Path, change: str
) -> None:
    review(locks, blocks)
    act, told = CHANGES[change]
    act(blocks)
    with pytest.raises(ModelError, match=rf"not what was reviewed: {told}; nothing of it was run"):
        require_reviewed(locks, blocks)


def test_code_that_was_never_reviewed_is_refused_with_the_command(
    blocks: Path, locks: Path
) -> None:
    with pytest.raises(ModelError, match=rf"never reviewed.*exeunt blocks review {blocks}"):
        require_reviewed(locks, blocks)


def compiled(blocks: Path) -> None:
    (blocks / "__pycache__").mkdir()
    (blocks / "__pycache__" / "block.cpython-311.pyc").write_bytes(b"\0")


def link_out(blocks: Path) -> None:
    outside = blocks.parent / "outside.py"
    outside.write_text("")
    (blocks / "linked.py").symlink_to(outside)


def remote_entry(blocks: Path) -> None:
    text = json.dumps({"auto_map": {"ModularPipelineBlocks": "someone/repo--block.Damped"}})
    (blocks / "modular_config.json").write_text(text)


def many_files(blocks: Path) -> None:
    for number in range(MAX_NUM_FILES):
        (blocks / f"more_{number}.py").write_text("")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "compiled code": (compiled, "__pycache__ is compiled code"),
    "a shared library": (
        lambda d: (d / "fast.so").write_bytes(b"\x7fELF"),
        "fast.so is compiled code",
    ),
    "a link that leads out": (link_out, "linked.py is a link that leads out of"),
    "a folder behind a link": (
        lambda d: (d / "again").symlink_to(d / "math_of"),
        "again is a link to a folder",
    ),
    "code of another repository": (remote_entry, "code of another repository is never run"),
    "no configuration": (lambda d: (d / "modular_config.json").unlink(), "no modular_config.json"),
    "a configuration that is no JSON": (
        lambda d: (d / "modular_config.json").write_text("{"),
        "not a JSON object",
    ),
    "a class that is not there": (
        lambda d: (d / "block.py").write_text("class Other: ...\n"),
        "block.py has no class Damped",
    ),
    "a module that is not there": (lambda d: (d / "block.py").unlink(), "there is no block.py"),
    "code that is no Python": (
        lambda d: (d / "extra.py").write_text("def ("),
        "extra.py is not Python",
    ),
    "bytes that are no text": (
        lambda d: (d / "extra.py").write_bytes(b"\xff\xfe"),
        "extra.py is not UTF-8",
    ),
    "code that trusts other code": (
        lambda d: (d / "extra.py").write_text("load('x', trust_remote_code=True)\n"),
        "extra.py, line 1: trust_remote_code would run code that nobody has reviewed",
    ),
    "code that trusts by a variable": (
        lambda d: (d / "extra.py").write_text("load('x', trust_remote_code=yes)\n"),
        "trust_remote_code would run",
    ),
    "code that trusts by a key": (
        lambda d: (d / "extra.py").write_text("load('x', **{'trust_remote_code': True})\n"),
        "trust_remote_code would run",
    ),
    "a line that reads otherwise than it runs": (
        lambda d: (d / "extra.py").write_text("is_safe = True  # \u202e }\u2066 if fox: \u2069\n"),
        r"extra.py, line 1: U\+202E changes the order",
    ),
    "a module by its bare name": (
        lambda d: (d / "extra.py").write_text("import block\n"),
        r"extra.py imports 'block', the name of a file of this folder; write `from .block",
    ),
    "a file that is too long": (
        lambda d: (d / "extra.py").write_text("#" * (MAX_FILE_NBYTES + 1)),
        "too many to review",
    ),
    "too many files": (many_files, f"over {MAX_NUM_FILES} files of code"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_reviewed_is_refused_and_leaves_no_lock(
    blocks: Path, locks: Path, kind: str
) -> None:
    act, told = REFUSED[kind]
    act(blocks)
    with pytest.raises(ModelError, match=told):
        review(locks, blocks)
    assert not list(locks.rglob("*.json"))


def test_a_review_executes_nothing(blocks: Path, locks: Path, tmp_path: Path) -> None:
    with (blocks / "block.py").open("a") as file:
        file.write(marker_line(tmp_path / "marker"))
    before = set(sys.modules)
    review(locks, blocks)
    assert not (tmp_path / "marker").exists()
    assert not {name for name in set(sys.modules) - before if "block" in name}


def test_a_lock_that_was_changed_is_refused(blocks: Path, locks: Path) -> None:
    digest = review(locks, blocks)
    path = locks / FOLDER / f"{digest}.json"
    path.write_bytes(path.read_bytes().replace(b"0.9", b"0.8"))
    with pytest.raises(ModelError, match="changed after the review"):
        read_lock(locks, digest)
    with pytest.raises(ModelError, match="changed after the review"):
        require_reviewed(locks, blocks)
    assert reviews(locks) == []


def test_a_forgotten_lock_runs_no_more(blocks: Path, locks: Path) -> None:
    digest = review(locks, blocks)
    forget(locks, digest)
    with pytest.raises(ModelError, match="were not reviewed here"):
        read_lock(locks, digest)
    with pytest.raises(ModelError, match="never reviewed"):
        require_reviewed(locks, blocks)


def test_an_older_review_runs_as_long_as_its_lock_is_there(blocks: Path, locks: Path) -> None:
    first = review(locks, blocks)
    (blocks / "block.py").write_text(DAMPED["block.py"] + "\n")
    second = review(locks, blocks)
    last = last_review(locks, blocks)
    assert last is not None and last.digest == second
    (blocks / "block.py").write_text(DAMPED["block.py"])
    assert require_reviewed(locks, blocks).digest == first


def test_blocks_are_chosen_for_the_whole_pipeline_or_by_name(blocks: Path, locks: Path) -> None:
    digest = review(locks, blocks)
    assert chosen_blocks(locks, [str(blocks)]) == {"pipeline": digest}
    assert chosen_blocks(locks, [f"denoise.denoise={blocks}"]) == {"denoise.denoise": digest}
    with pytest.raises(RequestError, match=r"denoise\.denoise are given twice"):
        chosen_blocks(locks, [f"denoise.denoise={blocks}"] * 2)


def test_inputs_of_blocks_are_json_or_texts() -> None:
    texts = ["damping=0.5", "colours=[1, 2]", "mode=soft", "name=a=b", "on=true"]
    assert parse_block_inputs(texts, {"pipeline": "0" * 64}) == {
        "damping": 0.5,
        "colours": [1, 2],
        "mode": "soft",
        "name": "a=b",
        "on": True,
    }


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["damping"], "expected NAME=VALUE"),
        (["da mping=1"], "expected NAME=VALUE"),
        (["a=1", "a=2"], "block_input a is given twice"),
        (["a=NaN"], "block_input a: nan cannot be part of a request"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(texts: list[str], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        parse_block_inputs(texts, {"pipeline": "0" * 64})


def test_inputs_without_blocks_are_refused() -> None:
    with pytest.raises(RequestError, match="has nothing to go to; give --blocks as well"):
        parse_block_inputs(["damping=0.5"], {})


def test_inputs_go_to_the_phase_that_takes_them() -> None:
    phases = {
        "encode": PhaseFacts(components=(), options=("prompt",), inputs=()),
        "denoise": PhaseFacts(components=(), options=("damping", "height"), inputs=()),
    }
    manifest = Manifest(family="f", task="t", pipeline="P", phases=phases)
    found = {
        stage: inputs_of_phase({"damping": 0.5}, manifest, stage, {"damping": None})
        for stage in phases
    }
    assert found == {"encode": {}, "denoise": {"damping": 0.5}}
    with pytest.raises(RequestError, match="height is an argument of the command"):
        inputs_of_phase({"height": 64}, manifest, "denoise", {"height": 128})


def test_an_outline_names_imports_calls_and_what_the_block_takes(blocks: Path) -> None:
    (blocks / "extra.py").write_text(
        "import os.path\nfrom .math_of import damping\n\n"
        "def save(data):\n    open('x', 'w').write(data)\n"
    )
    sources = read_block_sources(blocks)
    outline = outline_file(sources, "extra.py")
    assert outline.imports == ("os.path",) and outline.calls == ("line 5: open",)
    entry = outline_entry(sources)
    assert entry.bases == ("ZImageDenoiseStep",)
    assert entry.inputs == ("damping",) and entry.outputs == ()


def test_a_name_that_only_running_the_code_would_tell_is_marked(blocks: Path) -> None:
    text = DAMPED["block.py"].replace('InputParam("damping"', "InputParam(NAME")
    (blocks / "block.py").write_text(text)
    assert outline_entry(read_block_sources(blocks)).inputs == (COMPUTED,)

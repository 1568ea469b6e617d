"""What the code of custom blocks says of itself, read as a syntax tree and never executed."""

from __future__ import annotations

import ast
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from stages.block_sources import BlockSources
from stages.errors import ModelError

TRUST = "trust_remote_code"
_DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_WORTH_A_LOOK = {
    *("eval", "exec", "__import__", "import_module", "open", "system", "popen", "Popen"),
    *("check_output", "check_call", "urlopen", "connect", "remove", "rmtree", "unlink", "load"),
    *("from_pretrained", "hf_hub_download", "snapshot_download"),
}
_SPECIFICATIONS = {
    "inputs": "InputParam",
    "intermediate_outputs": "OutputParam",
    "expected_components": "ComponentSpec",
}
_OF_LOOPS = "loop_"
COMPUTED = "(computed)"
"""Stands for a name that only running the code would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutline:
    """One Python file.

    Attributes:
        imports: Modules from outside of the folder that it imports, by their full names.
        calls: Calls that a reviewer should look at, as `line 12: open`.
    """

    imports: tuple[str, ...]
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOutline:
    """The class that is the block; names that the code computes are `(computed)`.

    Attributes:
        bases: The classes that it is made from.
        inputs: What it takes.
        outputs: What it makes.
        components: The models that it asks for.
    """

    bases: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    components: tuple[str, ...]


def outline_file(sources: BlockSources, name: str) -> FileOutline:
    """Imports and noteworthy calls of a Python file.

    Raises:
        ModelError: It is not Python, or would run code that is not in the folder.
    """
    _refuse_what_misleads(sources.files[name], name)
    tree = _parsed(sources, name)
    _refuse_trust(tree, name)
    imports = {each for node in ast.walk(tree) for each in _imported(node)}
    own = {module.partition(".")[0] for module in sources.modules} - {""}
    if mixed := sorted(each for each in imports if each.partition(".")[0] in own):
        raise ModelError(
            f"{name} imports {mixed[0]!r}, the name of a file of this folder; write "
            f"`from .{mixed[0]} import ...`, so that no other module of that name is taken"
        )
    calls = {
        f"line {node.lineno}: {called}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (called := _called(node)) in _WORTH_A_LOOK
    }
    return FileOutline(
        imports=tuple(sorted(imports)),
        calls=tuple(sorted(calls, key=lambda text: int(text.split()[1].rstrip(":")))),
    )


def outline_entry(sources: BlockSources) -> EntryOutline:
    """Inputs, outputs and components of the block's class, as far as its text tells.

    Raises:
        ModelError: The module has no such class.
    """
    module, _, name = sources.entry.rpartition(".")
    path = sources.modules[module]
    for node in _parsed(sources, path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = {member: _named(node, member, kind) for member, kind in _SPECIFICATIONS.items()}
            return EntryOutline(
                bases=tuple(ast.unparse(base) for base in node.bases),
                inputs=found["inputs"],
                outputs=found["intermediate_outputs"],
                components=found["expected_components"],
            )
    raise ModelError(f"{path} has no class {name}, which its configuration names")


def is_standard(module: str) -> bool:
    """Whether a module is of Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _parsed(sources: BlockSources, name: str) -> ast.Module:
    try:
        return ast.parse(sources.files[name], name)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not Python that this version reads: {error}") from error


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _refuse_what_misleads(text: str, name: str) -> None:
    """Marks of writing direction let a line read otherwise than it runs."""
    for number, line in enumerate(text.split("\n"), 1):
        if marks := [mark for mark in line if unicodedata.bidirectional(mark) in _DIRECTIONS]:
            raise ModelError(
                f"{name}, line {number}: U+{ord(marks[0]):04X} changes the order in which the line "
                "is shown, but not in which it runs; take it out, or write it as an escape"
            )


def _refuse_trust(tree: ast.Module, name: str) -> None:
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and node.value == TRUST  # a key of a dict
        is_on = isinstance(node, ast.keyword) and node.arg == TRUST and _is_on(node.value)
        if (is_text or is_on) and isinstance(node, ast.Constant | ast.keyword):
            raise ModelError(
                f"{name}, line {node.lineno}: {TRUST} would run code that nobody has reviewed; "
                "put that code into the folder"
            )


def _is_on(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value in (False, None))


def _named(owner: ast.ClassDef, member: str, kind: str) -> tuple[str, ...]:
    """The names in the calls of `kind` within one member of a class."""
    found = []
    for node in owner.body:
        name = getattr(node, "name", "") or _target(node)
        if name.removeprefix(_OF_LOOPS) != member:
            continue
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        found += [_first_name(call) for call in calls if _called(call) == kind]
        if not found:
            found.append(COMPUTED)
    return tuple(found)


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _first_name(call: ast.Call) -> str:
    named = [each.value for each in call.keywords if each.arg == "name"]
    for value in (*call.args[:1], *named):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return COMPUTED

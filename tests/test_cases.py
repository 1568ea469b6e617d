"""`cases.md` names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "tests" / "cases.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d", line)
]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_stands_once_and_names_a_test() -> None:
    cases = [case for case, _, _ in ROWS]
    assert cases == sorted(set(cases), key=lambda case: [int(n) for n in case.split(".")])
    assert [case for case, _, shown_by in ROWS if "::" not in shown_by] == []


def test_every_test_that_a_case_names_exists() -> None:
    named = {
        (path, name)
        for _, _, shown_by in ROWS
        for path, name in re.findall(r"`([^`:]+)::([^`]+)`", shown_by)
    }
    assert len(named) > len(ROWS)
    files = {path: names_in(ROOT / path) for path, _ in named if (ROOT / path).is_file()}
    missing = {f"{path}::{name}" for path, name in named if name not in files.get(path, set())}
    assert missing == set()

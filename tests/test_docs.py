"""Every bash block of the tutorials does what the page says, in the order of the page."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shell import run_bash

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted((REPOSITORY / "docs" / "tutorials").glob("*.md"))
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")


def bash_blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_run(page: Path, tmp_path: Path) -> None:
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "EXEUNT_"))
    }
    environ |= {
        "EXEUNT_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    blocks = bash_blocks(page)
    assert blocks
    try:
        for block in blocks:
            run_bash(block, tmp_path, environ)
    finally:
        subprocess.run(["exeunt", "down"], env=environ, capture_output=True, check=False)
    assert list((tmp_path / "pictures").glob("*.png"))


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    dead = [
        f"{page.relative_to(REPOSITORY)} -> {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not dead


def test_the_index_names_every_page_but_the_decisions() -> None:
    folder = REPOSITORY / "docs"
    listed = set(LINK.findall((folder / "README.md").read_text(encoding="utf-8")))
    pages = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.md")}
    assert pages <= listed


def test_the_reference_names_every_option_of_every_family() -> None:
    from flows.cli import COMMANDS, FAMILIES

    folder = REPOSITORY / "docs" / "reference"
    pages = [folder / "command-line.md", folder / "families.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for name, (module_name, _) in FAMILIES.items():
        module = importlib.import_module(module_name)
        function = getattr(module, module_name.rpartition(".")[2]).fn
        options = ["--" + each.replace("_", "-") for each in inspect.signature(function).parameters]
        missing = [option for option in options if f"`{option}`" not in text]
        assert f"`exeunt {name}`" in text and not missing
    assert all(f"`{name}" in text or f" {name}`" in text for name in COMMANDS)

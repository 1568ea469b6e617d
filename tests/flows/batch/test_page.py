"""`docs/how-to/run-a-batch.md`, run as a reader would."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from flows.prefect_api import PrefectApi
from flows.server_state import read_state
from flows.settings import Home
from tests.support.kills import Victim
from tests.support.shell import run_bash

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "run-a-batch.md"


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "home", Path("miniature"))
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, line in (("exeunt", "-m flows"), ("python", "")):
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {line} "$@"\n')
        script.chmod(0o755)
    environ = victim.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PAGE.parents[2]),
    }
    try:
        blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        told = [run_bash(block, tmp_path, environ) for block in blocks]
        gallery = _gallery(Home(root=victim.home))
    finally:
        victim.stop_server()
    assert sorted(path.name for path in (tmp_path / "night").glob("*.png")) == [
        "001-a-large-red-circle-on-a-white-background.png",
        "002-a-small-green-star-on-a-yellow-background.png",
    ]
    assert re.findall(r"\[(\w+)\]\(http://127\.0\.0\.1:43../media/", gallery) == ["circle", "star"]
    lines = told[-1].splitlines()
    assert lines[0].startswith("circle done 001-a-large-red-circle-on-a-white-background.png {")
    assert lines[2].startswith("crooked invalid night.csv row 3: seed is 18446744073709551616")


def _gallery(home: Home) -> str:
    """The pictures on Prefect's page of the batch."""
    state = read_state(home)
    assert state is not None
    wanted = {"artifacts": {"key": {"any_": ["gallery"]}}}
    found = PrefectApi(state.api_url, {}).call("POST", "/artifacts/filter", wanted)
    return str(max(found, key=lambda each: each["created"])["data"])

"""The C++ tests, each way of compiling them once. A second run only links what changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", ["asan", "tsan"])
def test_the_cpp_tests_pass_under_sanitizers(preset: str) -> None:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool, path=path) is None:
            pytest.skip(f"no {tool} to build the C++ tests with")
    result = subprocess.run(
        [ROOT / "tests/native/run_sanitizers.sh", preset],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    passed, total = result.stdout.splitlines()[-1].split(" tests passed")[0].split(" of ")
    assert int(passed) == int(total) > 50

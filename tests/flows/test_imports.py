"""The flow process loads no torch, whatever it imports of this project."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "flows.cli",
    "flows.cli_family",
    "flows.cli_artifacts",
    "flows.run",
    "flows.z_image",
    "flows.flux",
    "flows.sdxl",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_flow_module_loads_no_torch(module: str) -> None:
    heavy = "torch", "diffusers", "transformers", "ddo", "native"
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_parses_without_prefect() -> None:
    code = "import sys, flows.cli; print('prefect' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"


def test_the_server_of_pictures_loads_neither_torch_nor_prefect() -> None:
    """It stays as long as the Prefect server does, so it has to be small."""
    heavy = "torch", "diffusers", "transformers", "prefect"
    code = f"import sys, flows.media_server; print([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The page on adding a family, done literally in a copy of the checkout."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.shell import run_bash
from tests.support.tiny_families import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-family.md"
BLOCK = re.compile(
    r"^```(\w+)(?: (file|into)=(\S+))?(?: after=\"([^\"\n]*)\")?\n(.*?)^```", re.M | re.S
)

# An editable install finds the packages of the checkout, whatever PYTHONPATH says.
USE_THE_COPY = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "_editable_" not in type(each).__module__]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the packages, `native` with its compiled part."""
    root = tmp_path / "checkout"
    for name in ("flows", "stages", "ddo", "native"):
        for folder in importlib.import_module(name).__path__:
            shutil.copytree(
                folder,
                root / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    (root / "sitecustomize.py").write_text(USE_THE_COPY)
    return root


def follow(root: Path) -> list[str]:
    """Write and edit the files that the page names; returns the commands it gives."""
    commands = []
    for language, how, name, anchor, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        path = root / name
        if how == "file":
            assert not path.exists()
            path.write_text(text)
        elif how == "into":
            before = path.read_text()
            assert before.count(f"{anchor}\n") == 1
            path.write_text(before.replace(f"{anchor}\n", f"{anchor}\n{text}"))
        else:
            assert language == "bash"
            commands.append(text)
    return commands


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_family_of_the_page_paints_the_unsplit_pipelines_picture(
    checkout: Path, tiny: Any, home: Path, tmp_path: Path, prefect_server: str
) -> None:
    import torch

    from tests.support.whole_run import run_whole

    model_dir = tiny(CASES["z-image"])
    ask, paint = follow(checkout)
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": tools,
        "FOX_MODEL": str(model_dir),
        "PREFECT_API_URL": prefect_server,
    }

    asked = run_bash(ask, tmp_path, environ)
    assert "denoise.denoise" in asked and "text_encoder" in asked
    run_bash(paint, tmp_path, environ)
    (picture,) = (tmp_path / "pictures").glob("*.png")
    case = CASES["z-image"]
    whole = run_whole(
        case.family,
        model_dir,
        {
            "prompt": "a small red fox",
            "negative_prompt": "blurry",
            "max_sequence_length": 512,
            "height": 64,
            "width": 64,
            "num_inference_steps": 3,
            "output_type": "pil",
        },
        seed=7,
        dtype=torch.float32,
        guidance={"guider": 3.0},
    )
    assert np.array_equal(np.asarray(Image.open(picture)), np.asarray(whole[0]))

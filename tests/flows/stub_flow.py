"""A flow that a worker can import and finish without a model."""

from __future__ import annotations

import os
from pathlib import Path

from prefect import flow


@flow(name="stub", persist_result=False)
def stub(prompt: str, output: str) -> None:
    """Write where and how it ran."""
    Path(output).write_text(f"{prompt} {os.environ['EXEUNT_HOME']}")

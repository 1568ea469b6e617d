"""What a model recommends for itself. Loads no Prefect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.errors import RequestError


def model_settings(directory: Path) -> dict[str, Any]:
    """The settings that a model recommends for itself, from its `exeunt.json`; often none."""
    path = directory / "exeunt.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}; correct it or remove it") from error
    if not isinstance(found, dict):
        raise RequestError(f"{path} holds a {type(found).__name__}; it has to be one JSON object")
    return found

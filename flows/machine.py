"""What `exeunt doctor` has measured, kept per machine in the home for `exeunt plan`.

A home may lie on a file system that several machines share, so each has a file of its own.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from pathlib import Path
from typing import Any

from flows.settings import Home
from stages.forecast_records import Rates

SCHEMA = "exeunt.machine/1"
_RATES = ("link_bytes_per_s", "flops_per_s", "disk_bytes_per_s", "device_bytes")


def machine_path(home: Home) -> Path:
    """Where the figures of this machine lie."""
    name = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "unnamed"
    return home.root / "machines" / f"{name}.json"


def keep_rates(home: Home, figures: dict[str, Any]) -> Path:
    """Write measured figures, whole or not at all; those not measured this time stay.

    Args:
        figures: Names of `Rates` with numbers, `device_name` and `measured_at` as text.
    """
    path = machine_path(home)
    known = {name: value for name, value in figures.items() if value is not None}
    document = {**_read(path), **known, "schema": SCHEMA}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(path)
    return path


def kept_rates(home: Home) -> Rates:
    """What is known of this machine; nothing where nothing was measured, or not by this version."""
    document = _read(machine_path(home))
    found: dict[str, Any] = {
        name: value for name in _RATES if _is_rate(value := document.get(name))
    }
    if not found:
        return Rates()
    device, day = document.get("device_name"), str(document.get("measured_at", ""))[:10]
    source = " ".join(f"measured on {device or 'this machine'} {day}".split())
    return Rates(**found, source=source)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return {}
    return document


def _is_rate(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0

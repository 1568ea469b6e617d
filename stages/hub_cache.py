"""Models in the Hugging Face hub's cache, found by their ids. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stages.errors import ModelError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def hub_cache() -> Path:
    """Where the hub's libraries keep what they have fetched, by their own environment variables."""
    if found := os.environ.get("HF_HUB_CACHE"):
        return Path(found).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "hub"


def cached_snapshot(hub_id: str) -> Path:
    """The folder of a hub id's `main` revision in the cache.

    Raises:
        ModelError: It is not there; with where was looked and how to fetch it.
    """
    folder = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    snapshot = folder / "snapshots" / revision
    if not re.fullmatch(r"[\w.-]+", revision) or not snapshot.is_dir():
        raise ModelError(
            f"{hub_id!r} is no folder in {Path.cwd()} and not in the hub's cache {hub_cache()}; "
            f"fetch it with: hf download {hub_id}"
        )
    return snapshot

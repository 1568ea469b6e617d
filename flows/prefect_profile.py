"""The Prefect settings that Exeunt ships, and how they reach Prefect.

Prefect reads its settings while it is imported, so `apply_profile` comes before that. What a
user has set, in the environment, in a Prefect profile or in a file of the folder, stays.
This module loads no Prefect.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.settings import Home

PROFILE: dict[str, str] = {
    # Nothing is told to anybody: neither the client's nor the server's usage reports. The
    # server's are also what made SQLite answer "database is locked" at start.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # Leases in memory are forgotten when the server restarts: their holder is cancelled in the
    # middle of a stage, and the slot stays taken for good.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
    # Seconds; the least that Prefect allows. A run is given up after three missed ones.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # One row per transaction is what keeps the server minutes behind a batch.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
    # Without flow_runs the database grows for ever; runs go after 90 days, events after 7.
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    # Seconds; the default of 20 is not enough on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Seconds between a worker's looks at its pool; it is one machine's own server.
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}


def apply_profile(home: Home, env: MutableMapping[str, str] | None = None) -> None:
    """Set what of `PROFILE` the user has not set, and where the embedded server keeps its files.

    `PREFECT_HOME` becomes the home's own folder unless the user has one or names a server;
    the user's profiles file stays in force. Once Prefect is imported, this still reaches
    child processes, but not this one.

    Args:
        home: Where this user's files lie.
        env: By default this process's environment; changed in place.
    """
    env = os.environ if env is None else env
    user = user_settings(env)
    if "PREFECT_HOME" not in env and "PREFECT_API_URL" not in user:
        profiles = _profiles_path(env)
        env["PREFECT_HOME"] = str(home.prefect)
        if profiles.is_file():
            env.setdefault("PREFECT_PROFILES_PATH", str(profiles))
    for name, value in PROFILE.items():
        if name not in user:
            env[name] = value


def user_settings(
    env: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, str]:
    """What the user has set for Prefect, by the names of environment variables.

    Looks where Prefect looks, from the weakest to the strongest source: the active profile,
    `pyproject.toml`, `prefect.toml` and `.env` of the folder, the environment. A file that
    cannot be read counts as empty; Prefect itself complains about it.

    Args:
        env: By default this process's environment.
        folder: By default the current one.
    """
    env = os.environ if env is None else env
    folder = folder or Path.cwd()
    found: dict[str, str] = {}
    found |= _active_profile(env)
    pyproject = _toml(folder / "pyproject.toml").get("tool", {})
    if isinstance(pyproject, dict):
        found |= dict(_flat(pyproject.get("prefect", {})))
    found |= dict(_flat(_toml(folder / "prefect.toml")))
    found |= dict(_dotenv(folder / ".env"))
    found |= {name: value for name, value in env.items() if _is_setting(name)}
    return found


def _is_setting(name: str) -> bool:
    return name.startswith("PREFECT_") or name in PROFILE


def _profiles_path(env: Mapping[str, str]) -> Path:
    if path := env.get("PREFECT_PROFILES_PATH"):
        return Path(path).expanduser()
    return Path(env.get("PREFECT_HOME") or "~/.prefect").expanduser() / "profiles.toml"


def _active_profile(env: Mapping[str, str]) -> dict[str, str]:
    document = _toml(_profiles_path(env))
    name = env.get("PREFECT_PROFILE") or document.get("active")
    profiles = document.get("profiles", {})
    settings = profiles.get(name, {}) if isinstance(profiles, dict) else {}
    return {key: str(value) for key, value in settings.items()}


def _toml(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return tomllib.loads(path.read_text(encoding="utf-8"))
    return {}


def _flat(table: Any, prefix: str = "PREFECT") -> Iterator[tuple[str, str]]:
    """`{"api": {"url": ...}}` as `PREFECT_API_URL`."""
    if not isinstance(table, dict):
        return
    for key, value in table.items():
        name = f"{prefix}_{key}".upper()
        if isinstance(value, dict):
            yield from _flat(value, name)
        else:
            yield name, str(value)


def _dotenv(path: Path) -> Iterator[tuple[str, str]]:
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, is_assignment, value = line.strip().removeprefix("export ").partition("=")
            if is_assignment and _is_setting(name.strip()):
                yield name.strip(), value.strip().strip("'\"")

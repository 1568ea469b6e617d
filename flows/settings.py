"""The few settings of a run, read from the environment once and checked there."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from stages.contracts import DEFAULT_CHECKPOINT_EVERY_S
from stages.errors import RequestError

Launch = Literal["forkserver", "spawn"]

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]*))?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
# As in ddo.attaching, which the flow process does not load.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR_SETTING = re.compile(r"\w+:(\[[^\[\]]*\]|[^\s,:\[\]]+)")
_COMMA = re.compile(r",(?![^\[]*\])")  # outside of brackets
# What a driver puts there for any process that may use the GPU; the second one is WSL's.
_GPU_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


class SettingsError(RequestError):
    """An environment variable holds what cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where one user's files lie. Naming a folder creates nothing.

    Attributes:
        root: Absolute.
    """

    root: Path

    @property
    def prefect(self) -> Path:
        """`PREFECT_HOME` of the embedded server: its database, log and state."""
        return self.root / "prefect"

    @property
    def locks(self) -> Path:
        """One file per result that is being computed right now."""
        return self.root / "locks"

    @property
    def reports(self) -> Path:
        """A folder for each run: its journal, and a report of each stage request."""
        return self.root / "reports"

    @property
    def store(self) -> Path:
        """Artifacts, unless `EXEUNT_STORE` names another place."""
        return self.root / "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Where a run keeps its files and how it starts stages.

    Attributes:
        home: `EXEUNT_HOME`; else `exeunt` under `XDG_DATA_HOME`, else under `~/.local/share`.
        store_url: `EXEUNT_STORE` as a URL; else the folder `store` of the home.
        launch: `EXEUNT_LAUNCH`: `forkserver` (default) makes a stage process in
            milliseconds, `spawn` starts an interpreter for each.
        device: `EXEUNT_DEVICE`: `cpu`, `cuda` or `cuda:N`; else `cuda` where a GPU's device
            file exists, and `cpu` elsewhere.
        allow_urls: `EXEUNT_ALLOW_URLS`: whether pictures may be fetched from web addresses.
        checkpoint_every_steps: `EXEUNT_CHECKPOINT_EVERY_STEPS`: denoising steps between two
            checkpoints; else time alone decides.
        preview_every_steps: `EXEUNT_PREVIEW_EVERY_STEPS`: denoising steps between two previews;
            else there are none.
        checkpoint_every_s: `EXEUNT_CHECKPOINT_EVERY_S`: seconds between two checkpoints; None
            where it says `off`.
    """

    home: Home
    store_url: str
    launch: Launch = "forkserver"
    device: str = "cpu"
    allow_urls: bool = False
    checkpoint_every_steps: int | None = None
    preview_every_steps: int | None = None
    checkpoint_every_s: float | None = DEFAULT_CHECKPOINT_EVERY_S

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RunSettings:
        """Settings out of `env`, by default this process's; an empty value counts as unset.

        Raises:
            SettingsError: A variable holds what cannot be used; the message says what can.
        """
        env = os.environ if env is None else env
        _check_allocator_settings(env)
        home = Home(root=_home(env))
        return cls(
            home=home,
            store_url=_store_url(env, home),
            launch=_launch(env),
            device=_device(env),
            allow_urls=_allow_urls(env),
            checkpoint_every_steps=_every_steps(env, "EXEUNT_CHECKPOINT_EVERY_STEPS"),
            preview_every_steps=_every_steps(env, "EXEUNT_PREVIEW_EVERY_STEPS"),
            checkpoint_every_s=_checkpoint_every_s(env),
        )


def _home(env: Mapping[str, str]) -> Path:
    if text := env.get("EXEUNT_HOME", ""):
        folder = _absolute("EXEUNT_HOME", text)
    else:
        data = env.get("XDG_DATA_HOME", "")
        # The XDG rules say that a relative value is to be ignored.
        base = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
        folder = base / "exeunt"
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"EXEUNT_HOME is {folder}, which is a file; name a folder")
    return folder


def _check_allocator_settings(env: Mapping[str, str]) -> None:
    """Refuse what torch cannot read: it ends the process that imports it, without an exception."""
    for name in _ALLOCATOR_VARIABLES:
        text = env.get(name, "")
        for setting in _COMMA.split(text) if text.strip() else ():
            if not _ALLOCATOR_SETTING.fullmatch(setting.strip()):
                raise SettingsError(
                    f"{name} is {text!r}, in which {setting.strip()!r} is no setting; write "
                    "name:value pairs with commas between, such as max_split_size_mb:128, or "
                    "unset it"
                )


def _store_url(env: Mapping[str, str], home: Home) -> str:
    text = env.get("EXEUNT_STORE", "")
    if not text:
        return f"file://{home.store}"
    if _URL.fullmatch(text):
        scheme, _, rest = text.partition("://")
        if scheme == "file" and not rest.startswith("/"):
            raise SettingsError(
                f"EXEUNT_STORE is {text!r}, which has a relative path; write file:///absolute/path"
            )
        return text
    return f"file://{_absolute('EXEUNT_STORE', text)}"


def _absolute(name: str, text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute():
        # A worker's runs start in another folder than the shell that set the variable.
        raise SettingsError(
            f"{name} is {text!r}, a relative path; set it to an absolute one, "
            f"such as {Path.cwd() / path}"
        )
    return Path(os.path.normpath(path))


def _launch(env: Mapping[str, str]) -> Launch:
    text = env.get("EXEUNT_LAUNCH", "") or "forkserver"
    if text not in get_args(Launch):
        raise SettingsError(f"EXEUNT_LAUNCH is {text!r}; set it to {' or '.join(get_args(Launch))}")
    return cast(Launch, text)


def _device(env: Mapping[str, str]) -> str:
    text = env.get("EXEUNT_DEVICE", "")
    if not text:
        return "cuda" if any(path.exists() for path in _GPU_DEVICE_FILES) else "cpu"
    if not _DEVICE.fullmatch(text):
        raise SettingsError(
            f"EXEUNT_DEVICE is {text!r}; set it to cpu, cuda, or cuda:N such as cuda:0"
        )
    return text


def _allow_urls(env: Mapping[str, str]) -> bool:
    text = env.get("EXEUNT_ALLOW_URLS", "")
    if text not in ("", "0", "1"):
        raise SettingsError(f"EXEUNT_ALLOW_URLS is {text!r}; set it to 1 or 0, or leave it unset")
    return text == "1"


def _every_steps(env: Mapping[str, str], name: str) -> int | None:
    if not (text := env.get(name, "")):
        return None
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise SettingsError(
            f"{name} is {text!r}; set it to a number of denoising steps, 1 or more, or leave it "
            "unset"
        )
    return int(text)


def _checkpoint_every_s(env: Mapping[str, str]) -> float | None:
    name = "EXEUNT_CHECKPOINT_EVERY_S"
    text = env.get(name, "")
    if not text:
        return DEFAULT_CHECKPOINT_EVERY_S
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise SettingsError(f"{name} is {text!r}; set it to seconds over 0, such as 60, or off")
    return seconds

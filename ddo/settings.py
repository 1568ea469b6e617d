"""What a user may say about offloading, checked when it is said."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ddo.errors import DdoError
from ddo.sizes import GIB, parse_nbytes, show_nbytes

Preset = Literal["auto", "resident", "stream", "low_memory", "group", "off"]
PRESETS: tuple[str, ...] = get_args(Preset)

ENVIRONMENT = {
    "DDO_PRESET": "preset",
    "DDO_DEVICE_BUDGET": "device_budget",
    "DDO_HOST_BUDGET": "host_budget",
    "DDO_RESERVE": "reserve",
    "DDO_LINK_RATE": "link_rate",
}
"""Every environment variable of this package, and the setting that it gives a value."""


class SettingsError(DdoError, ValueError):
    """A setting has a value that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """How a module's weights share the device with its work. Nothing here changes a result.

    Amounts are bytes or text such as "12GiB"; `*_bytes` properties give them as bytes.

    Attributes:
        preset: `auto` keeps all weights on the device if they fit, else streams. `resident`
            keeps all, or fails. `stream` finds the fastest mix below the budget. `low_memory`
            streams all that can be streamed through the smallest ring. `group` is diffusers'
            own group offload. `off` leaves the module alone.
        device_budget: Device memory for weights, ring and the module's own work together.
            None: what is free when the module is attached.
        host_budget: Host memory that may be pinned. None: three fifths of what MemAvailable
            and the control groups leave.
        reserve: The part of `device_budget` that weights and ring leave to the module's work.
            None: a quarter of the budget, at most 3 GiB.
        link_rate: Bytes per second from host to device. None: measured once per process.
        ring: Bytes of the ring, in place of the planner's choice.
        replan: Whether measured times may change the plan between two steps.
        max_oom_retries: How often a step that ran out of memory gives weights back and starts
            again.
    """

    preset: Preset = "auto"
    device_budget: int | str | None = None
    host_budget: int | str | None = None
    reserve: int | str | None = None
    link_rate: int | str | None = None
    ring: int | str | None = None
    replan: bool = True
    max_oom_retries: int = 3

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise SettingsError(
                f"preset is {self.preset!r}, allowed are {', '.join(PRESETS)}; choose one of these"
            )
        for name in ("device_budget", "host_budget", "reserve", "link_rate", "ring"):
            value = getattr(self, name)
            if value is not None:
                try:
                    parse_nbytes(value)
                except (ValueError, OverflowError) as error:
                    raise SettingsError(f"{name}: {error}") from error
        if not isinstance(self.replan, bool):
            raise SettingsError(f"replan is {self.replan!r}, allowed are True and False")
        retries = self.max_oom_retries
        if not isinstance(retries, int) or isinstance(retries, bool) or not 0 <= retries <= 100:
            raise SettingsError(f"max_oom_retries is {retries!r}, allowed are 0 to 100")
        budget, reserve = self.device_budget_bytes, self._bytes("reserve")
        if budget is not None and reserve is not None and reserve >= budget:
            raise SettingsError(
                f"reserve of {show_nbytes(reserve)} leaves nothing of the device budget of "
                f"{show_nbytes(budget)} to weights; lower reserve"
            )

    def _bytes(self, name: str) -> int | None:
        value = getattr(self, name)
        return None if value is None else parse_nbytes(value)

    @property
    def device_budget_bytes(self) -> int | None:
        return self._bytes("device_budget")

    @property
    def host_budget_bytes(self) -> int | None:
        return self._bytes("host_budget")

    @property
    def reserve_bytes(self) -> int | None:
        return self._bytes("reserve")

    @property
    def link_bytes_per_s(self) -> int | None:
        return self._bytes("link_rate")

    @property
    def ring_bytes(self) -> int | None:
        return self._bytes("ring")

    def weight_budget_bytes(self, device_budget_bytes: int) -> int:
        """What weights and ring may take of a device budget, in bytes."""
        reserve = self._bytes("reserve")
        if reserve is None:
            reserve = min(math.ceil(device_budget_bytes / 4), 3 * GIB)
        return max(0, device_budget_bytes - reserve)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> OffloadSettings:
        """Settings given here, completed by the `DDO_*` variables, then by the defaults.

        Raises:
            SettingsError: A value cannot be used, or a `DDO_*` variable is not known.
        """
        found = os.environ if environment is None else environment
        unknown = sorted(n for n in found if n.startswith("DDO_") and n not in ENVIRONMENT)
        if unknown:
            raise SettingsError(
                f"environment has {', '.join(unknown)}, known are {', '.join(ENVIRONMENT)}; "
                "correct or remove it"
            )
        known = {field.name for field in fields(cls)}
        if wrong := sorted(set(settings) - known):
            raise SettingsError(
                f"no setting is called {', '.join(wrong)}; known are {', '.join(sorted(known))}"
            )
        for variable, name in ENVIRONMENT.items():
            if found.get(variable) and name not in settings:
                settings[name] = found[variable]
        return cls(**settings)

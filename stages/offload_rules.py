"""What a run says about offload, checked before any process starts. Loads no torch.

`ddo` is imported only when something was said: a run that says nothing takes the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from stages.contracts import OffloadChoice
from stages.errors import RequestError

VARIABLES = "DDO_"
"""Prefix of the variables that give a setting a value where the run gives none."""


def choose_offload(
    preset: str | None = None,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    link_rate: int | str | None = None,
) -> OffloadChoice:
    """What is given here, completed by the `DDO_*` variables, then by the defaults.

    Args:
        device_budget: Bytes, or text such as `12GiB`.
        host_budget: The same.
        link_rate: The same, per second.

    Raises:
        RequestError: A value cannot be used; the message says what can.
    """
    env = os.environ if env is None else env
    said = {
        "preset": preset,
        "device_budget": device_budget,
        "host_budget": host_budget,
        "link_rate": link_rate,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if not given and not any(name.startswith(VARIABLES) for name in env):
        return OffloadChoice()
    from ddo.settings import OffloadSettings, SettingsError

    try:
        settings = OffloadSettings.from_environment(env, **given)
    except SettingsError as error:
        raise RequestError(f"offload: {error}") from error
    return OffloadChoice(
        preset=settings.preset,
        device_budget=settings.device_budget_bytes,
        host_budget=settings.host_budget_bytes,
        reserve=settings.reserve_bytes,
        link_rate=settings.link_bytes_per_s,
    )


def without_effect(
    device: str, preset: str | None, device_budget: object, host_budget: object
) -> str | None:
    """A sentence for a run that asks for offload on the CPU; None where it has an effect.

    Only what the run itself says counts: variables are often set for a whole machine.
    """
    names = {"offload": preset, "device_budget": device_budget, "host_budget": host_budget}
    said = [name for name, value in names.items() if value not in (None, "auto", "off")]
    if device != "cpu" or not said:
        return None
    verb = "has" if len(said) == 1 else "have"
    return (
        f"{' and '.join(said)} {verb} no effect on device cpu, which computes with weights where "
        "they are mapped; give a cuda device to stream them"
    )

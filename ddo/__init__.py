"""Dynamic offload: any torch module computes on a device that need not hold its weights.

Names are imported when they are first used, so that a forecast loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddo.attaching import attach
    from ddo.errors import DdoError
    from ddo.forecasting import Forecast, forecast
    from ddo.lifecycle import OffloadSession
    from ddo.loading import load
    from ddo.metrics import OffloadReport
    from ddo.planning import OffloadPlan, plan
    from ddo.routes import Session
    from ddo.settings import OffloadSettings

__all__ = [
    "DdoError",
    "Forecast",
    "OffloadPlan",
    "OffloadReport",
    "OffloadSession",
    "OffloadSettings",
    "Session",
    "attach",
    "forecast",
    "load",
    "plan",
]

_MODULES = {
    "DdoError": "errors",
    "Forecast": "forecasting",
    "OffloadPlan": "planning",
    "OffloadReport": "metrics",
    "OffloadSession": "lifecycle",
    "OffloadSettings": "settings",
    "Session": "routes",
    "attach": "attaching",
    "forecast": "forecasting",
    "load": "loading",
    "plan": "planning",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""The real stages, but for a Z-Image transformer that answers at once.

`EXEUNT_STAGE_HANDLERS=tests.support.stub_denoiser` puts them in the real ones' place: what is
left of a batch's time is the engine's.
"""

from __future__ import annotations

from typing import Any

from stages.contracts import StageContext, StageRequest, StageResult
from stages.worker import HANDLERS as REAL
from stages.worker import Events

HANDLERS = REAL | {"denoise": "tests.support.stub_denoiser:run"}
ENVIRON = {"EXEUNT_STAGE_HANDLERS": "tests.support.stub_denoiser"}


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Denoise with a transformer that predicts half of what it is given."""
    from diffusers import ZImageTransformer2DModel

    from stages import denoise

    ZImageTransformer2DModel.forward = _half
    return denoise.run(request, context, events)


def _half(self: Any, x: list[Any], *args: Any, **kwargs: Any) -> tuple[list[Any]]:
    return ([each * 0.5 for each in x],)

"""What a fork server imports before it makes its first stage process; loads no torch itself."""

from __future__ import annotations

from stages import worker
from stages.families import family_named


def preload_names(family: str | None = None) -> tuple[str, ...]:
    """What every stage needs, and what the stages of one family need besides.

    Returns:
        `module` or `module:attribute`: libraries resolve their classes only when asked by name.

    Raises:
        RequestError: The family is unknown.
    """
    return (
        "torch",
        "safetensors.torch",
        "accelerate",
        *(family_named(family).preload if family else ()),
        *worker.HANDLERS.values(),
        "ddo.lifecycle",
        "ddo.backend",
    )

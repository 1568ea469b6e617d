"""What a fork server imports before it makes its first stage process; loads no torch itself."""

from __future__ import annotations

from stages import worker
from stages.families import family_named


def preload_names(*families: str) -> tuple[str, ...]:
    """What every stage needs, and what the stages of some families need besides.

    Returns:
        `module` or `module:attribute`: libraries resolve their classes only when asked by name.

    Raises:
        RequestError: A family is unknown.
    """
    return (
        "torch",
        "safetensors.torch",
        "accelerate",
        "diffusers:ModularPipeline",
        *dict.fromkeys(name for each in families for name in family_named(each).preload),
        *worker.HANDLERS.values(),
        "ddo.lifecycle",
        "ddo.backend",
    )

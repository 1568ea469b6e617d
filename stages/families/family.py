"""What a model family declares; everything else is computed from its pipeline's blocks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from stages.errors import RequestError

FAMILIES: Mapping[str, str] = {"z-image": "stages.families.z_image"}
"""Each family by its name, with the module that declares it as `FAMILY`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family: the few facts that its pipeline's blocks do not tell.

    Attributes:
        name: What users type, such as `z-image`.
        pipeline: Modular pipeline class of diffusers.
        tasks: For each task, the inputs that select its blocks.
        output: The value of the last phase that is the product, such as `images`.
        guidance: Guider component -> the option that sets its scale; empty where the scale
            is an ordinary argument of the pipeline.
        tokenizers: Tokenizer component -> the text encoder it feeds; the order is that of
            the report on truncated prompts.
        token_limit: The option that limits the number of tokens.
        chat_template: Whether prompts go through the tokenizer's chat template first.
        carried: Tensors that the denoising loop carries from step to step.
        dtypes: Component -> dtype, where it is not the dtype of the request.
    """

    name: str
    pipeline: str
    tasks: Mapping[str, tuple[str, ...]]
    output: str
    guidance: Mapping[str, str] = field(default_factory=dict)
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    token_limit: str = "max_sequence_length"
    chat_template: bool = False
    carried: tuple[str, ...] = ("latents",)
    dtypes: Mapping[str, str] = field(default_factory=dict)


def family_named(name: str) -> Family:
    """The declaration of a family.

    Raises:
        RequestError: No family has this name; the message lists those there are.
    """
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise RequestError(f"family {name!r} is unknown; the families are {known}")
    family: Family = importlib.import_module(FAMILIES[name]).FAMILY
    return family

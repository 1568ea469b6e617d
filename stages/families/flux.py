"""FLUX.1: CLIP and T5, a double- and single-stream transformer, an AutoencoderKL.

Kontext is the same model taught to edit: it looks at the picture instead of starting from it.
"""

from dataclasses import replace

from stages.families.family import EDIT, IMAGE_TO_IMAGE, TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="flux",
    pipeline="FluxModularPipeline",
    models=("FluxPipeline",),
    tasks=TEXT_TO_IMAGE | IMAGE_TO_IMAGE,
    output="images",
    tokenizers={
        "tokenizer": Reading(encoder="text_encoder", limit="own"),
        "tokenizer_2": Reading(encoder="text_encoder_2"),
    },
    drawing=("condition",),
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:FluxAutoBlocks",
        "diffusers:FluxModularPipeline",
        "diffusers:FluxTransformer2DModel",
        "transformers:CLIPTextModel",
        "transformers:CLIPTokenizer",
        "transformers:T5EncoderModel",
        "transformers:T5TokenizerFast",
    ),
)

KONTEXT = replace(
    FAMILY,
    name="flux-kontext",
    pipeline="FluxKontextModularPipeline",
    models=("FluxKontextPipeline",),
    tasks=TEXT_TO_IMAGE | EDIT,
    drawing=(),
    preload=(
        *FAMILY.preload,
        "diffusers:FluxKontextAutoBlocks",
        "diffusers:FluxKontextModularPipeline",
    ),
)

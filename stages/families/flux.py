"""FLUX.1: CLIP and T5, a double- and single-stream transformer, an AutoencoderKL."""

from stages.families.family import TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="flux",
    pipeline="FluxModularPipeline",
    models=("FluxPipeline",),
    tasks=TEXT_TO_IMAGE,
    output="images",
    tokenizers={
        "tokenizer": Reading(encoder="text_encoder", limit="own"),
        "tokenizer_2": Reading(encoder="text_encoder_2"),
    },
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

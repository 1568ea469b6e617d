"""Wan: a UMT5 text encoder, one transformer (2.1) or two (2.2), an AutoencoderKLWan.

Wan 2.2 denoises with one transformer down to the noise of `boundary_ratio` and with the other
below it, each with a guider of its own.
"""

from dataclasses import replace

from stages.families.family import Family, Reading

TEXT_TO_VIDEO = {"text-to-video": ("prompt",)}

FAMILY = Family(
    name="wan",
    pipeline="WanModularPipeline",
    models=("WanPipeline",),
    tasks=TEXT_TO_VIDEO,
    output="videos",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder")},
    dtypes={"vae": "float32"},
    preload=(
        "diffusers:AutoencoderKLWan",
        "diffusers:UniPCMultistepScheduler",
        "diffusers:WanBlocks",
        "diffusers:WanModularPipeline",
        "diffusers:WanTransformer3DModel",
        "diffusers:Wan22Blocks",
        "diffusers:Wan22ModularPipeline",
        "transformers:T5TokenizerFast",
        "transformers:UMT5EncoderModel",
    ),
)

FAMILY_22 = replace(
    FAMILY,
    name="wan22",
    pipeline="Wan22ModularPipeline",
    guidance={"guider": "guidance_scale", "guider_2": "guidance_scale_2"},
)

"""Z-Image: one Qwen3 text encoder, a single-stream transformer, an AutoencoderKL."""

from stages.families.family import CHAT, IMAGE_TO_IMAGE, TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="z-image",
    pipeline="ZImageModularPipeline",
    models=("ZImagePipeline",),
    tasks=TEXT_TO_IMAGE | IMAGE_TO_IMAGE,
    output="images",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder", template=CHAT)},
    drawing=("condition",),
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:ZImageAutoBlocks",
        "diffusers:ZImageModularPipeline",
        "diffusers:ZImageTransformer2DModel",
        "transformers:Qwen2Tokenizer",
        "transformers:Qwen3Model",
    ),
)

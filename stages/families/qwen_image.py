"""Qwen-Image: one Qwen2.5-VL text encoder, a transformer, an AutoencoderKLQwenImage."""

from stages.families.family import TEXT_TO_IMAGE, Family, Reading

TEMPLATES = "diffusers.modular_pipelines.qwenimage.prompt_templates"

FAMILY = Family(
    name="qwen-image",
    pipeline="QwenImageModularPipeline",
    models=("QwenImagePipeline",),
    tasks=TEXT_TO_IMAGE,
    output="images",
    guidance={"guider": "guidance_scale"},
    tokenizers={
        "tokenizer": Reading(
            encoder="text_encoder",
            template=f"{TEMPLATES}:QWENIMAGE_PROMPT_TEMPLATE",
            num_unread=34,  # QWENIMAGE_PROMPT_TEMPLATE_START_IDX, there
        )
    },
    max_tokens=1024,
    preload=(
        "diffusers:AutoencoderKLQwenImage",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:QwenImageAutoBlocks",
        "diffusers:QwenImageModularPipeline",
        "diffusers:QwenImageTransformer2DModel",
        "transformers:Qwen2Tokenizer",
        "transformers:Qwen2_5_VLForConditionalGeneration",
    ),
)

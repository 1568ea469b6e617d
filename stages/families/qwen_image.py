"""Qwen-Image: one Qwen2.5-VL text encoder, a transformer, an AutoencoderKLQwenImage.

The edit models' text encoder reads the picture together with the prompt, so the two are encoded
as one; the later one (2509 and on) takes several pictures.
"""

from dataclasses import replace

from stages.families.family import (
    EDIT,
    IMAGE_TO_IMAGE,
    INPAINT,
    TEXT_TO_IMAGE,
    Family,
    Reading,
)

TEMPLATES = "diffusers.modular_pipelines.qwenimage.prompt_templates"

FAMILY = Family(
    name="qwen-image",
    pipeline="QwenImageModularPipeline",
    models=("QwenImagePipeline",),
    tasks=TEXT_TO_IMAGE | IMAGE_TO_IMAGE | INPAINT,
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
    constants=("processed_mask_image",),
    finished=("inpaint",),
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

EDITOR = replace(
    FAMILY,
    name="qwen-image-edit",
    pipeline="QwenImageEditModularPipeline",
    models=("QwenImageEditPipeline",),
    tasks=EDIT,
    tokenizers={},  # its processor puts the picture among the tokens, and takes no limit
    token_limit="",
    finished=(),
    preload=(
        *FAMILY.preload,
        "diffusers:QwenImageEditAutoBlocks",
        "diffusers:QwenImageEditModularPipeline",
        "transformers:Qwen2VLProcessor",
    ),
)

EDITOR_PLUS = replace(
    EDITOR,
    name="qwen-image-edit-plus",
    pipeline="QwenImageEditPlusModularPipeline",
    models=("QwenImageEditPlusPipeline",),
    preload=(
        *FAMILY.preload,
        "diffusers:QwenImageEditPlusAutoBlocks",
        "diffusers:QwenImageEditPlusModularPipeline",
        "transformers:Qwen2VLProcessor",
    ),
)

"""HunyuanVideo 1.5: a Qwen2.5-VL text encoder, ByT5 for texts in quotes, an AutoencoderKL.

What ByT5 reads are the quoted parts of a prompt; a prompt without any gives zeros.
"""

from dataclasses import replace

from stages.families.family import CHAT, IMAGE_TO_VIDEO, TEXT_TO_VIDEO, Family, Reading

FAMILY = Family(
    name="hunyuan-video",
    pipeline="HunyuanVideo15ModularPipeline",
    models=("HunyuanVideo15Pipeline",),
    tasks=TEXT_TO_VIDEO,
    output="videos",
    guidance={"guider": "guidance_scale"},
    tokenizers={
        "tokenizer": Reading(
            encoder="text_encoder",
            limit=1000,  # `tokenizer_max_length` of the pipeline
            template=CHAT,
            system="diffusers:HunyuanVideo15ModularPipeline.system_message",
            num_unread=108,  # `prompt_template_encode_start_idx` there
        )
    },
    token_limit="",
    constants=(
        *("prompt_embeds_2", "negative_prompt_embeds_2"),
        *("prompt_embeds_mask", "negative_prompt_embeds_mask"),
        *("prompt_embeds_mask_2", "negative_prompt_embeds_mask_2"),
    ),
    preload=(
        "diffusers:AutoencoderKLHunyuanVideo15",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:HunyuanVideo15AutoBlocks",
        "diffusers:HunyuanVideo15ModularPipeline",
        "diffusers:HunyuanVideo15Transformer3DModel",
        "transformers:ByT5Tokenizer",
        "transformers:Qwen2Tokenizer",
        "transformers:Qwen2_5_VLTextModel",
        "transformers:T5EncoderModel",
    ),
)

FROM_IMAGE = replace(
    FAMILY,
    name="hunyuan-video-i2v",
    models=("HunyuanVideo15ImageToVideoPipeline",),
    tasks=IMAGE_TO_VIDEO,
    preload=(
        *FAMILY.preload,
        "transformers:SiglipImageProcessor",
        "transformers:SiglipVisionModel",
    ),
)

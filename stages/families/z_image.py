"""Z-Image: one Qwen3 text encoder, a single-stream transformer, an AutoencoderKL."""

from stages.families.family import Family

FAMILY = Family(
    name="z-image",
    pipeline="ZImageModularPipeline",
    tasks={"text-to-image": ("prompt",)},
    output="images",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": "text_encoder"},
    chat_template=True,
)

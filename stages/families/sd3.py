"""Stable Diffusion 3: two CLIP text encoders and T5, a transformer, an AutoencoderKL."""

from stages.families.family import IMAGE_TO_IMAGE, TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="sd3",
    pipeline="StableDiffusion3ModularPipeline",
    models=("StableDiffusion3Pipeline",),
    tasks=TEXT_TO_IMAGE | IMAGE_TO_IMAGE,
    output="images",
    guidance={"guider": "guidance_scale"},
    tokenizers={
        "tokenizer": Reading(encoder="text_encoder", limit="own"),
        "tokenizer_2": Reading(encoder="text_encoder_2", limit="own"),
        "tokenizer_3": Reading(encoder="text_encoder_3"),
    },
    sized_by="transformer",
    optional=("text_encoder_3", "tokenizer_3"),
    drawing=("condition",),
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:SD3Transformer2DModel",
        "diffusers:StableDiffusion3AutoBlocks",
        "diffusers:StableDiffusion3ModularPipeline",
        "transformers:CLIPTextModelWithProjection",
        "transformers:CLIPTokenizer",
        "transformers:T5EncoderModel",
        "transformers:T5TokenizerFast",
    ),
)

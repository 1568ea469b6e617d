"""Stable Diffusion 1.x and 2.x: a CLIP text encoder, a UNet, an AutoencoderKL; classic only.

A model may have a safety checker, which then looks at each picture as the pipeline has it do.
"""

from stages.families.family import TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="sd15",
    pipeline="StableDiffusionPipeline",
    models=("StableDiffusionPipeline",),
    tasks=TEXT_TO_IMAGE,
    output="images",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    denoiser="unet",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder", limit="own")},
    token_limit="",
    sized_by="unet",
    optional=("safety_checker", "feature_extractor", "image_encoder"),
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:PNDMScheduler",
        "diffusers:StableDiffusionPipeline",
        "diffusers:UNet2DConditionModel",
        "stages.classic",
        "transformers:CLIPTextModel",
        "transformers:CLIPTokenizer",
    ),
)

"""Stable Diffusion XL: two CLIP text encoders, a UNet, an AutoencoderKL."""

from stages.families.family import IMAGE_TO_IMAGE, INPAINT, TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="sdxl",
    pipeline="StableDiffusionXLModularPipeline",
    models=("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline"),
    tasks=TEXT_TO_IMAGE | IMAGE_TO_IMAGE | {"inpaint": (*INPAINT["inpaint"], "padding_mask_crop")},
    output="images",
    denoiser="unet",
    guidance={"guider": "guidance_scale"},
    tokenizers={
        "tokenizer": Reading(encoder="text_encoder", limit="own"),
        "tokenizer_2": Reading(encoder="text_encoder_2", limit="own"),
    },
    token_limit="",
    sized_by="unet",
    drawing=("condition",),
    constants=(
        *("negative_prompt_embeds", "negative_pooled_prompt_embeds"),  # zeros for none
        *("mask", "image_latents", "masked_image_latents"),
    ),
    lent={"denoise": ("vae",)},
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:EulerDiscreteScheduler",
        "diffusers:StableDiffusionXLAutoBlocks",
        "diffusers:StableDiffusionXLModularPipeline",
        "diffusers:UNet2DConditionModel",
        "transformers:CLIPTextModel",
        "transformers:CLIPTextModelWithProjection",
        "transformers:CLIPTokenizer",
    ),
)

"""PixArt-Sigma: a T5 text encoder, a transformer, an AutoencoderKL; classic only.

The transformer was taught certain sizes: by default the nearest of them is painted, then scaled
and cut to the size that was asked for.
"""

from stages.families.family import TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="pixart",
    pipeline="PixArtSigmaPipeline",
    models=("PixArtSigmaPipeline",),
    tasks=TEXT_TO_IMAGE,
    output="images",
    encoded=(
        *("prompt_embeds", "prompt_attention_mask"),
        *("negative_prompt_embeds", "negative_prompt_attention_mask"),
    ),
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder", is_lowered=True)},
    max_tokens=300,
    sized_by="transformer",
    preload=(
        "diffusers:AutoencoderKL",
        "diffusers:DPMSolverMultistepScheduler",
        "diffusers:PixArtSigmaPipeline",
        "diffusers:PixArtTransformer2DModel",
        "stages.classic",
        "transformers:T5EncoderModel",
        "transformers:T5TokenizerFast",
    ),
)

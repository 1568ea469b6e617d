"""CogVideoX: a T5 text encoder, a transformer, an AutoencoderKLCogVideoX; classic only.

Its scheduler hands the pipeline a second value besides the latents, which goes into the next step.
"""

from stages.families.family import TEXT_TO_VIDEO, Family, Reading

FAMILY = Family(
    name="cogvideox",
    pipeline="CogVideoXPipeline",
    models=("CogVideoXPipeline",),
    tasks=TEXT_TO_VIDEO,
    output="videos",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder")},
    max_tokens=226,
    layout="BFCHW",
    preload=(
        "diffusers:AutoencoderKLCogVideoX",
        "diffusers:CogVideoXDDIMScheduler",
        "diffusers:CogVideoXDPMScheduler",
        "diffusers:CogVideoXPipeline",
        "diffusers:CogVideoXTransformer3DModel",
        "stages.classic",
        "transformers:T5EncoderModel",
        "transformers:T5TokenizerFast",
    ),
)

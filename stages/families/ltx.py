"""LTX Video: a T5 text encoder, a transformer, an AutoencoderKLLTXVideo.

Its decoder takes a last denoising step of its own, for which it draws noise.
"""

from stages.families.family import IMAGE_TO_VIDEO, TEXT_TO_VIDEO, Family, Reading

FAMILY = Family(
    name="ltx",
    pipeline="LTXModularPipeline",
    models=("LTXPipeline",),
    tasks=TEXT_TO_VIDEO | IMAGE_TO_VIDEO,
    output="videos",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder")},
    drawing=("condition",),
    constants=("prompt_attention_mask", "negative_prompt_attention_mask"),
    preload=(
        "diffusers:AutoencoderKLLTXVideo",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:LTXAutoBlocks",
        "diffusers:LTXModularPipeline",
        "diffusers:LTXVideoTransformer3DModel",
        "transformers:T5EncoderModel",
        "transformers:T5TokenizerFast",
    ),
)

"""Sana: a Gemma 2 text encoder, a linear transformer, an AutoencoderDC of scale 32; classic only.

Before a prompt the pipeline puts an instruction to write it out, which the encoder reads along.
"""

from stages.families.family import TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="sana",
    pipeline="SanaPipeline",
    models=("SanaPipeline",),
    tasks=TEXT_TO_IMAGE,
    output="images",
    encoded=(
        *("prompt_embeds", "prompt_attention_mask"),
        *("negative_prompt_embeds", "negative_prompt_attention_mask"),
    ),
    guidance={"guider": "guidance_scale"},
    tokenizers={
        "tokenizer": Reading(
            encoder="text_encoder",
            is_lowered=True,
            instruction="diffusers:SanaPipeline.complex_human_instruction",
        )
    },
    max_tokens=300,
    sized_by="transformer",
    preload=(
        "diffusers:AutoencoderDC",
        "diffusers:DPMSolverMultistepScheduler",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:SanaPipeline",
        "diffusers:SanaTransformer2DModel",
        "stages.classic",
        "transformers:Gemma2Model",
        "transformers:GemmaTokenizerFast",
    ),
)

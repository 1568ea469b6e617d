"""FLUX.2 Klein: one Qwen3 text encoder, a transformer, an AutoencoderKLFlux2.

A distilled model has no guider; a base model is guided against an empty prompt.
"""

from dataclasses import replace

from stages.families.family import CHAT_WITHOUT_THINKING, EDIT, TEXT_TO_IMAGE, Family, Reading

FAMILY = Family(
    name="flux2-klein",
    pipeline="Flux2KleinModularPipeline",
    models=("Flux2KleinPipeline",),
    tasks=TEXT_TO_IMAGE | EDIT,
    output="images",
    tokenizers={"tokenizer": Reading(encoder="text_encoder", template=CHAT_WITHOUT_THINKING)},
    preload=(
        "diffusers:AutoencoderKLFlux2",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:Flux2KleinAutoBlocks",
        "diffusers:Flux2KleinBaseAutoBlocks",
        "diffusers:Flux2KleinBaseModularPipeline",
        "diffusers:Flux2KleinModularPipeline",
        "diffusers:Flux2Transformer2DModel",
        "transformers:Qwen2Tokenizer",
        "transformers:Qwen3ForCausalLM",
    ),
)

BASE = replace(
    FAMILY,
    name="flux2-klein-base",
    pipeline="Flux2KleinBaseModularPipeline",
    guidance={"guider": "guidance_scale"},
)

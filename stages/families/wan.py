"""Wan: a UMT5 text encoder, one transformer (2.1) or two (2.2), an AutoencoderKLWan.

Wan 2.2 denoises with one transformer down to the noise of `boundary_ratio` and with the other
below it, each with a guider of its own. A model that starts from a picture is another model, and
Wan 2.1's looks at it through CLIP, too.
"""

from dataclasses import replace

from stages.families.family import (
    FIRST_AND_LAST_FRAME,
    IMAGE_TO_VIDEO,
    TEXT_TO_VIDEO,
    VIDEO_CONDITIONING,
    Family,
    Reading,
)

FAMILY = Family(
    name="wan",
    pipeline="WanModularPipeline",
    models=("WanPipeline",),
    tasks=TEXT_TO_VIDEO,
    output="videos",
    guidance={"guider": "guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder")},
    dtypes={"vae": "float32"},
    preload=(
        "diffusers:AutoencoderKLWan",
        "diffusers:UniPCMultistepScheduler",
        "diffusers:WanBlocks",
        "diffusers:WanModularPipeline",
        "diffusers:WanTransformer3DModel",
        "diffusers:Wan22Blocks",
        "diffusers:Wan22ModularPipeline",
        "transformers:T5TokenizerFast",
        "transformers:UMT5EncoderModel",
    ),
)

FAMILY_22 = replace(
    FAMILY,
    name="wan22",
    pipeline="Wan22ModularPipeline",
    guidance={"guider": "guidance_scale", "guider_2": "guidance_scale_2"},
)

FROM_IMAGE = replace(
    FAMILY,
    name="wan-i2v",
    pipeline="WanImage2VideoModularPipeline",
    models=("WanImageToVideoPipeline",),
    tasks=IMAGE_TO_VIDEO | FIRST_AND_LAST_FRAME,
    preload=(
        *FAMILY.preload,
        "diffusers:WanImage2VideoAutoBlocks",
        "diffusers:WanImage2VideoModularPipeline",
        "transformers:CLIPImageProcessor",
        "transformers:CLIPVisionModel",
    ),
)

FROM_IMAGE_22 = replace(
    FAMILY_22,
    name="wan22-i2v",
    pipeline="Wan22Image2VideoModularPipeline",
    models=FROM_IMAGE.models,
    tasks=IMAGE_TO_VIDEO,
    preload=(
        *FAMILY.preload,
        "diffusers:Wan22Image2VideoBlocks",
        "diffusers:Wan22Image2VideoModularPipeline",
    ),
)

VACE_22 = replace(
    FAMILY_22,
    name="wan22-vace",
    pipeline="Wan22VaceModularPipeline",
    models=("WanVACEPipeline",),
    tasks=VIDEO_CONDITIONING,
    constants=("denoiser_input_fields.control_hidden_states_scale",),
    preload=(
        *FAMILY.preload,
        "diffusers:Wan22VaceBlocks",
        "diffusers:Wan22VaceModularPipeline",
        "diffusers:WanVACETransformer3DModel",
    ),
)

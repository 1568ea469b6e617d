"""LTX-2: Gemma 3 and two connectors, one transformer for picture and sound, VAEs for each.

Picture and sound are denoised together, each with a schedule and a guider of its own. The length
is always given: a model's own guess at it is left out.
"""

from stages.families.family import Family, Reading

FAMILY = Family(
    name="ltx2",
    pipeline="LTX2ModularPipeline",
    models=("LTX2Pipeline",),
    tasks={
        "text-to-video": ("prompt", "num_frames"),
        "image-to-video": ("prompt", "image", "num_frames"),
    },
    output="videos",
    sound="audio",
    sound_rate=("vocoder", "output_sampling_rate"),
    guidance={"guider": "guidance_scale", "audio_guider": "audio_guidance_scale"},
    tokenizers={"tokenizer": Reading(encoder="text_encoder")},
    max_tokens=1024,
    carried=("latents", "audio_latents"),
    constants=("connector_attention_mask", "negative_connector_attention_mask"),
    # What the text encoder would be asked when it is not told, `image_crf`, is always told.
    lent={"condition": ("text_encoder",), "denoise": ("audio_vae",)},
    optional=("duration_head", "processor", "prompt_enhancer"),
    preload=(
        "diffusers:AutoencoderKLLTX2Audio",
        "diffusers:AutoencoderKLLTX2Video",
        "diffusers:FlowMatchEulerDiscreteScheduler",
        "diffusers:LTX2AutoBlocks",
        "diffusers:LTX2ModularPipeline",
        "diffusers:LTX2VideoTransformer3DModel",
        "diffusers.pipelines.ltx2:LTX2TextConnectors",
        "diffusers.pipelines.ltx2:LTX2Vocoder",
        "transformers:Gemma3ForConditionalGeneration",
        "transformers:GemmaTokenizerFast",
    ),
)

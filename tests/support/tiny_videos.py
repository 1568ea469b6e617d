"""Tiny video models with random weights in diffusers layout: seconds to build, no download.

Their VAEs' scales differ from the defaults that blocks fall back to, where that is possible, so
that a phase without a stand-in would compute other shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from tests.support.tiny_models import save, t5_config, vace_transformer, wan_transformer
from tests.support.tiny_tokenizers import byte_level_tokenizer, t5_tokenizer

SAMPLE_RATE = 16_000
"""Samples a second of the tiny LTX-2's sound."""


def wan(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: Any = diffusers.WanPipeline,
    num_transformers: int = 1,
    **config: Any,
) -> Path:
    """Write a Wan 2.1 model of 0.7 MB; 64 x 64 pixels are 4 x 4 patches, 9 frames 3 latent ones.

    Args:
        kind: The pipeline class that the index names.
        num_transformers: 2 for a Wan 2.2 model, with a boundary between them.
        config: Of the transformers.
    """
    torch.manual_seed(seed)
    is_vace = kind is diffusers.WanVACEPipeline
    made = [
        vace_transformer() if is_vace else wan_transformer(num_layers=2, **config)
        for _ in range(num_transformers)
    ]
    own: dict[str, Any] = {}
    if num_transformers == 2:
        own = {"transformer_2": made[1], "boundary_ratio": 0.875}
    if kind is diffusers.WanImageToVideoPipeline:
        own |= _clip_vision() if num_transformers == 1 else _no_vision()
    pipeline = kind(
        transformer=made[0],
        vae=wan_vae(),
        text_encoder=transformers.UMT5EncoderModel(t5_config(transformers.UMT5Config)),
        tokenizer=t5_tokenizer(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=3.0,
        ),
        **own,
    )
    return save(pipeline, directory, dtype)


def wan_vae() -> Any:
    """A Wan VAE of scale 8 in space and 4 in time."""
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def _no_vision() -> dict[str, Any]:
    return {"image_encoder": None, "image_processor": None}


def _clip_vision() -> dict[str, Any]:
    config = transformers.CLIPVisionConfig(
        hidden_size=16,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        intermediate_size=16,
        patch_size=8,
    )
    size = {"height": 32, "width": 32}
    return {
        "image_encoder": transformers.CLIPVisionModel(config),
        "image_processor": transformers.CLIPImageProcessor(crop_size=size, size=size),
    }


def ltx(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write an LTX model of 0.6 MB; 64 x 64 pixels are 2 x 2 patches, 9 frames 2 latent ones."""
    torch.manual_seed(seed)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=True,
        patch_size=4,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    pipeline = diffusers.LTXPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=_shifting_scheduler(),
        text_encoder=transformers.T5EncoderModel(t5_config()),
        tokenizer=t5_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def _shifting_scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift_terminal=0.1, base_shift=0.95, max_shift=2.05
    )


def ltx2(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write an LTX-2 model of 2 MB, with sound; its VAE's scale is 2 in space and in time."""
    torch.manual_seed(seed)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        qk_norm="rms_norm_across_heads",
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=t5_tokenizer()._tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=1024,
    )
    audio_vae, vae = _ltx2_audio_vae(), _ltx2_vae()
    with torch.no_grad():  # other than what a stand-in would have
        audio_vae.latents_mean.fill_(0.05)
        audio_vae.latents_std.fill_(1.1)
        vae.latents_mean.fill_(0.02)
        vae.latents_std.fill_(0.9)
    pipeline = diffusers.LTX2Pipeline(
        transformer=transformer,
        vae=vae,
        audio_vae=audio_vae,
        scheduler=_shifting_scheduler(),
        text_encoder=_gemma(),
        tokenizer=tokenizer,
        connectors=_connectors(),
        vocoder=LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            leaky_relu_negative_slope=0.1,
            output_sampling_rate=SAMPLE_RATE,
        ),
    )
    return save(pipeline, directory, dtype)


def _gemma() -> Any:
    text = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 512,
        "sliding_window": 32,
        "max_position_embeddings": 2048,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _connectors() -> Any:
    return LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )


def _ltx2_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def _ltx2_audio_vae() -> Any:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        dropout=0.0,
        mid_block_add_attention=False,
        sample_rate=SAMPLE_RATE,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )


def hunyuan_video(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    looks_at_pictures: bool = False,
) -> Path:
    """Write a HunyuanVideo 1.5 model of 19 MB; its VAE's scale is 4 in space, 2 in time."""
    torch.manual_seed(seed)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="i2v" if looks_at_pictures else "t2v",
    )
    text_encoder = transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=512,
            rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            rope_theta=1e6,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    glyphs = transformers.T5Config(
        vocab_size=512,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        is_encoder_decoder=False,
        use_cache=False,
    )
    kind: Any = diffusers.HunyuanVideo15Pipeline
    own: dict[str, Any] = {}
    if looks_at_pictures:
        kind, own = diffusers.HunyuanVideo15ImageToVideoPipeline, _siglip()
    pipeline = kind(
        transformer=transformer,
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=text_encoder,
        text_encoder_2=transformers.T5EncoderModel(glyphs),
        tokenizer=byte_level_tokenizer(),
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **own,
    )
    return save(pipeline, directory, dtype)


def _siglip() -> dict[str, Any]:
    config = transformers.SiglipVisionConfig(
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 28, "width": 28}),
    }


def cogvideox(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scheduler: str = "CogVideoXDDIMScheduler",
    patch_size_t: int | None = None,
) -> Path:
    """Write a CogVideoX model of 0.6 MB; 64 x 64 pixels are 4 x 4 patches, 9 frames 3 latent ones.

    Args:
        patch_size_t: Latent frames of a patch, as in version 1.5.
    """
    torch.manual_seed(seed)
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        patch_size_t=patch_size_t,
        temporal_compression_ratio=4,
        max_text_seq_length=32,
        use_rotary_positional_embeddings=patch_size_t is not None,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        sample_height=64,
        sample_width=64,
    )
    with torch.no_grad():  # else most pixels are past black or white, which a codec smears
        vae.decoder.conv_out.conv.weight.mul_(0.2)
    pipeline = diffusers.CogVideoXPipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=transformers.T5EncoderModel(t5_config()),
        tokenizer=t5_tokenizer(),
        scheduler=getattr(diffusers, scheduler)(),
    )
    return save(pipeline, directory, dtype)

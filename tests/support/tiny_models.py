"""Tiny models with random weights in diffusers layout: seconds to build, no download.

They paint noise; what they are good for is that every bit of it is determined.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from tests.support.tiny_tokenizers import byte_level_tokenizer, clip_tokenizer, t5_tokenizer


def z_image(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Z-Image model of about 0.3 MB; 64 x 64 pixels are 4 x 4 patches."""
    torch.manual_seed(seed)
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[512, 32, 32],
    )
    with torch.no_grad():  # created empty: without values they would be whatever memory held
        transformer.x_pad_token.fill_(1)
        transformer.cap_pad_token.fill_(1)
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    text_encoder = transformers.Qwen3Model(
        transformers.Qwen3Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=512,
            max_position_embeddings=512,
        )
    )
    pipeline = diffusers.ZImagePipeline(
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=text_encoder,
        tokenizer=byte_level_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def flux(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    guidance_embeds: bool = True,
) -> Path:
    """Write a FLUX.1 model of 0.8 MB; 64 x 64 pixels are 4 x 4 patches."""
    torch.manual_seed(seed)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
        guidance_embeds=guidance_embeds,
    )
    pipeline = diffusers.FluxPipeline(
        transformer=transformer,
        vae=_autoencoder(4, shift_factor=0.0609, scaling_factor=1.5035, **_NO_QUANT),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        text_encoder=transformers.CLIPTextModel(_clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=transformers.T5EncoderModel(t5_config()),
        tokenizer_2=t5_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def sd15(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scheduler: str = "DDIMScheduler",
    safety_checker: Any = None,
) -> Path:
    """Write a Stable Diffusion 1.5 model of 0.5 MB; 64 x 64 pixels are 8 x 8 latents.

    Args:
        scheduler: Its class; a published model's is PNDM, which takes one step more than asked.
        safety_checker: Looks at the pictures, if there is one.
    """
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        cross_attention_dim=32,
        norm_num_groups=2,
    )
    own = {"PNDMScheduler": {"skip_prk_steps": True}, "DDIMScheduler": {"clip_sample": False}}
    made = getattr(diffusers, scheduler)(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        **own.get(scheduler, {}),
    )
    extractor = None
    if safety_checker is not None:
        size = {"height": 32, "width": 32}
        extractor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=_autoencoder(4),
        scheduler=made,
        text_encoder=transformers.CLIPTextModel(_clip_config()),
        tokenizer=clip_tokenizer(),
        safety_checker=safety_checker,
        feature_extractor=extractor,
        requires_safety_checker=safety_checker is not None,
    )
    return save(pipeline, directory, dtype)


def pixart(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, sample_size: int = 8
) -> Path:
    """Write a PixArt-Sigma model of 0.3 MB; 64 x 64 pixels are 4 x 4 patches.

    Args:
        sample_size: Latents along an edge that it was trained at; 32 and its doubles have a
            list of sizes that the model was taught.
    """
    torch.manual_seed(seed)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=sample_size,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
    )
    pipeline = diffusers.PixArtSigmaPipeline(
        transformer=transformer,
        vae=_autoencoder(4, scaling_factor=0.13025),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        text_encoder=transformers.T5EncoderModel(t5_config()),
        tokenizer=t5_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def sana(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Sana model of 0.3 MB; 64 x 64 pixels are 8 x 8 latents, as its VAE has scale 8."""
    torch.manual_seed(seed)
    levels = 4
    blocks = ("ResBlock",) * (levels - 1) + ("EfficientViTBlock",)
    scales = ((),) * (levels - 1) + ((5,),)
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8,) * levels,
        decoder_block_out_channels=(8,) * levels,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        encoder_layers_per_block=(1,) * levels,
        decoder_layers_per_block=(1,) * levels,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
    )
    text_encoder = transformers.Gemma2Model(
        transformers.Gemma2Config(
            head_dim=8,
            hidden_size=8,
            intermediate_size=16,
            max_position_embeddings=4096,
            num_attention_heads=2,
            num_hidden_layers=1,
            num_key_value_heads=2,
            vocab_size=512,
            query_pre_attn_scalar=8,
        )
    )
    pipeline = diffusers.SanaPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=text_encoder,
        tokenizer=byte_level_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def sdxl(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write an SDXL model of 0.7 MB; 64 x 64 pixels are 8 x 8 latents."""
    torch.manual_seed(seed)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(2, 4),
        layers_per_block=2,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
        norm_num_groups=1,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        steps_offset=1,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
    )
    pipeline = diffusers.StableDiffusionXLPipeline(
        unet=unet,
        vae=_autoencoder(4, scaling_factor=0.13025),
        scheduler=scheduler,
        text_encoder=transformers.CLIPTextModel(_clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=transformers.CLIPTextModelWithProjection(_clip_config()),
        tokenizer_2=clip_tokenizer(),
        add_watermarker=False,
    )
    return save(pipeline, directory, dtype)


def sd3(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    has_t5: bool = True,
    num_vae_blocks: int = 4,
) -> Path:
    """Write an SD3 model of 2 MB, less without T5; 64 x 64 pixels are 4 x 4 patches."""
    torch.manual_seed(seed)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
    )
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        vae=_autoencoder(
            4, num_vae_blocks, shift_factor=0.0609, scaling_factor=1.5305, **_NO_QUANT
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=transformers.CLIPTextModelWithProjection(_clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=transformers.CLIPTextModelWithProjection(_clip_config()),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=transformers.T5EncoderModel(t5_config()) if has_t5 else None,
        tokenizer_3=t5_tokenizer() if has_t5 else None,
    )
    return save(pipeline, directory, dtype)


def qwen_image(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Qwen-Image model of 2.5 MB; 64 x 64 pixels are 4 x 4 patches."""
    torch.manual_seed(seed)
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=4,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * 4,
        latents_std=[1.3] * 4,
    )
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_end_token_id=3,
        vision_start_token_id=4,
        vision_token_id=5,
        image_token_id=6,
        video_token_id=7,
    )
    pipeline = diffusers.QwenImagePipeline(
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            shift=1.0,
            max_shift=0.9,
            base_shift=0.5,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=byte_level_tokenizer(),
    )
    return save(pipeline, directory, dtype)


def flux2_klein(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    is_distilled: bool = True,
) -> Path:
    """Write a FLUX.2 Klein model of 0.6 MB; 64 x 64 pixels are 4 x 4 patches."""
    torch.manual_seed(seed)
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    )
    text_encoder = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=512,
            max_position_embeddings=4096,
        )
    )
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        sample_size=64,
        **_NO_QUANT,
    )
    vae.bn.running_mean.fill_(0.1)
    vae.bn.running_var.fill_(1.7)
    pipeline = diffusers.Flux2KleinPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        text_encoder=text_encoder,
        tokenizer=byte_level_tokenizer(),
        is_distilled=is_distilled,
    )
    return save(pipeline, directory, dtype)


def wan_transformer(
    kind: Any = diffusers.WanTransformer3DModel, *, in_channels: int = 16, **config: Any
) -> Any:
    """A Wan transformer of two heads."""
    return kind(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=32,
        freq_dim=64,
        ffn_dim=32,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
        **config,
    )


def vace_transformer() -> Any:
    """A Wan transformer with two layers that look at a control video."""
    kind = diffusers.WanVACETransformer3DModel
    return wan_transformer(kind, num_layers=3, vace_layers=[0, 2], vace_in_channels=96)


def wan22(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, is_vace: bool = False
) -> Path:
    """Write a Wan 2.2 model of two transformers; 64 x 64 pixels are 4 x 4 patches a frame."""
    torch.manual_seed(seed)
    made = [vace_transformer() if is_vace else wan_transformer(num_layers=2) for _ in range(2)]
    pipeline = diffusers.WanPipeline(
        transformer=made[0],
        transformer_2=made[1],
        boundary_ratio=0.875,
        vae=diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        text_encoder=transformers.UMT5EncoderModel(t5_config(transformers.UMT5Config)),
        tokenizer=t5_tokenizer(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            num_train_timesteps=1000,
            flow_shift=3.0,
        ),
    )
    return save(pipeline, directory, dtype)


_NO_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}


def save(pipeline: Any, directory: Path, dtype: torch.dtype) -> Path:
    """Write a pipeline's components in one dtype, as they are used: none of them trains."""
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(dtype).eval()
    pipeline.save_pretrained(directory)
    return directory


def _autoencoder(latent_channels: int, num_blocks: int = 4, **config: Any) -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * num_blocks,
        up_block_types=["UpDecoderBlock2D"] * num_blocks,
        block_out_channels=[8] * num_blocks,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=64,
        **config,
    )


def _clip_config() -> Any:
    return transformers.CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=1000,
        hidden_act="gelu",
        projection_dim=32,
    )


def t5_config(kind: Any = transformers.T5Config) -> Any:
    """A T5 of two layers for `t5_tokenizer`."""
    return kind(
        vocab_size=256,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        is_encoder_decoder=False,
        use_cache=False,
    )

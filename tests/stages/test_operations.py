"""Estimates of work and memory, held against what torch does at the published models' widths.

Layers are few, since every one costs the same; widths, tokens and frames are those of real runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from stages.activations import (
    sequence_activation_bytes,
    unet_activation_bytes,
    vae_activation_bytes,
)
from stages.operations import sequence_flops, unet_flops
from stages.size_rules import temporal_multiple, vae_scale
from stages.vae_operations import vae_flops
from tests.support.meta_costs import flops_of, peak_of

BF16 = torch.bfloat16


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=BF16)


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=2
    )


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=2, guidance_embeds=True)


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=128, num_layers=3, attention_head_dim=64, num_attention_heads=24,
        caption_projection_dim=1536, pos_embed_max_size=192,
    )  # fmt: skip


def ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(num_layers=2)


SEQUENCES: dict[str, tuple[Callable[[], Any], int, int, dict[str, tuple[int, ...]]]] = {
    "wan": (wan, 21 * 30 * 52, 512, {
        "hidden_states": (1, 16, 21, 60, 104), "encoder_hidden_states": (1, 512, 4096),
        "timestep": (1,),
    }),
    "flux": (flux, 4096, 512, {
        "hidden_states": (1, 4096, 64), "encoder_hidden_states": (1, 512, 4096), "timestep": (1,),
        "pooled_projections": (1, 768), "guidance": (1,), "img_ids": (4096, 3), "txt_ids": (512, 3),
    }),
    "sd3": (sd3, 4096, 333, {
        "hidden_states": (1, 16, 128, 128), "encoder_hidden_states": (1, 333, 4096),
        "pooled_projections": (1, 2048), "timestep": (1,),
    }),
    "ltx": (ltx, 21 * 16 * 22, 128, {
        "hidden_states": (1, 21 * 16 * 22, 128), "encoder_hidden_states": (1, 128, 4096),
        "timestep": (1,), "encoder_attention_mask": (1, 128),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_transformers_work_is_what_torch_counts_and_holds(name: str) -> None:
    build, num_tokens, num_text, inputs = SEQUENCES[name]
    with torch.device("meta"):
        module = build().eval()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(BF16)
    given: dict[str, Any] = {key: empty(*shape) for key, shape in inputs.items()}
    if name == "ltx":
        given |= {"num_frames": 21, "height": 16, "width": 22}
    shapes = shapes_of(module)
    counted = flops_of(lambda: module(**given))
    assert sequence_flops(shapes, num_tokens, num_text) == pytest.approx(counted, rel=0.01)
    held = peak_of(lambda: module(**given))
    estimate = sequence_activation_bytes(shapes, num_tokens + num_text, 2)
    assert estimate == pytest.approx(held, rel=0.3)


def sd15() -> Any:
    return diffusers.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)


def sdxl() -> Any:
    return diffusers.UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
        use_linear_projection=True,
    )


@pytest.mark.parametrize(("build", "edge", "width"), [(sd15, 64, 768), (sdxl, 128, 2048)])
def test_a_unets_work_is_what_torch_counts_and_holds(
    build: Callable[[], Any], edge: int, width: int
) -> None:
    with torch.device("meta"):
        unet = build().to(BF16).eval()
    added = {"text_embeds": empty(1, 1280), "time_ids": empty(1, 6)}

    def call() -> Any:
        return unet(empty(1, 4, edge, edge), 1, empty(1, 77, width), added_cond_kwargs=added)

    shapes = shapes_of(unet)
    assert unet_flops(shapes, edge, edge, 77) == pytest.approx(flops_of(call), rel=0.01)
    assert unet_activation_bytes(shapes, edge, edge, 2) == pytest.approx(peak_of(call), rel=0.15)


VAES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "AutoencoderKLWan": (diffusers.AutoencoderKLWan, (1, 16, 3, 60, 104)),
    "AutoencoderKLQwenImage": (diffusers.AutoencoderKLQwenImage, (1, 16, 1, 128, 128)),
    "AutoencoderKLLTXVideo": (diffusers.AutoencoderKLLTXVideo, (1, 128, 6, 16, 22)),
    "AutoencoderKLHunyuanVideo15": (diffusers.AutoencoderKLHunyuanVideo15, (1, 32, 3, 30, 53)),
}


@pytest.mark.parametrize("name", VAES)
def test_a_video_vaes_work_is_what_torch_counts_and_holds(name: str) -> None:
    build, latents = VAES[name]
    with torch.device("meta"):
        vae = build().to(BF16).eval()
    config = {**json.loads(json.dumps(dict(vae.config))), "_class_name": name}
    given = empty(*latents)
    with torch.no_grad():
        video = vae.decode(given, return_dict=False)[0]
    num_frames, height, width = video.shape[2:]
    sized: dict[str, Any] = {
        "scale": vae_scale(config),
        "patch": config.get("patch_size") or 1,
        "num_frames": num_frames,
        "packed": temporal_multiple(config),
    }
    shapes = shapes_of(vae)
    for encodes, call in (
        (False, lambda: vae.decode(given, return_dict=False)),
        (True, lambda: vae.encode(video)),
    ):
        estimate = vae_flops(shapes, *latents[-2:], encodes=encodes, **sized)
        assert estimate == pytest.approx(flops_of(call), rel=0.06)
    held = peak_of(lambda: vae.decode(given, return_dict=False))
    estimate = vae_activation_bytes(config, height, width, 2, num_frames=num_frames)
    assert estimate == pytest.approx(held, rel=0.15)


def test_a_picture_vaes_work_is_what_torch_counts_and_holds() -> None:
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512],
            layers_per_block=2,
            latent_channels=16,
        ).to(BF16)
    given, pixels = empty(1, 16, 96, 128), empty(1, 3, 768, 1024)
    shapes, calls = shapes_of(vae.eval()), (lambda: vae.decode(given), lambda: vae.encode(pixels))
    for encodes, call in zip((False, True), calls, strict=True):
        estimate = vae_flops(shapes, 96, 128, scale=8, encodes=encodes)
        assert estimate == pytest.approx(flops_of(call), rel=0.01)
    estimate = vae_activation_bytes(json.loads(json.dumps(dict(vae.config))), 768, 1024, 2)
    assert estimate == pytest.approx(peak_of(calls[0]), rel=0.05)


def test_a_text_encoder_that_is_given_no_picture_lets_its_eyes_rest() -> None:
    shapes = {"visual.blocks.0.attn.qkv.weight": (30, 10), "layers.0.mlp.up_proj.weight": (40, 10)}
    blind = sequence_flops(shapes, 7)
    assert blind == 2 * 400 * 7
    assert sequence_flops(shapes, 7, num_patches=5) == blind + 2 * 300 * 5

"""A diffusers transformer of three blocks, small enough for any test."""

from __future__ import annotations

import warnings

import torch


def make_transformer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional libraries that diffusers imports
        from diffusers import FluxTransformer2DModel
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return transformer.eval().requires_grad_(False)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def run(transformer, dtype=torch.float32):
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs().items()}
    with torch.no_grad():
        return transformer(**given, return_dict=False)[0]

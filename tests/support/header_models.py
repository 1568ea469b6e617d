"""Models of real size that take no disk: true headers over files that are one hole.

Loading them gives zeros; what they are good for is all that reads headers and configurations.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
Shapes = dict[str, tuple[int, ...]]


def write_weights(path: Path, shapes: Shapes, dtype: str = "BF16") -> int:
    """Write a safetensors file whose tensors are a hole; returns their bytes."""
    offset, entries = 0, {}
    for name, shape in shapes.items():
        end = offset + prod(shape) * _BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + offset)
    return offset


def z_image(directory: Path, *, dtype: str = "BF16") -> Path:
    """A Z-Image of six billion parameters, with its text encoder of four billion."""
    parts: dict[str, tuple[str, str, dict[str, Any], Shapes]] = {
        "transformer": (
            "diffusers",
            "ZImageTransformer2DModel",
            {"all_patch_size": [2], "in_channels": 16, "dim": 3840, "n_layers": 30},
            _transformer(3840, 30),
        ),
        "text_encoder": (
            "transformers",
            "Qwen3Model",
            {"hidden_size": 2560, "num_hidden_layers": 36},
            _qwen(2560, 9728, 36),
        ),
        "vae": (
            "diffusers",
            "AutoencoderKL",
            {
                "block_out_channels": [128, 256, 512, 512],
                "latent_channels": 16,
                "sample_size": 1024,
            },
            _decoder([512, 512, 256, 128]),
        ),
    }
    index: dict[str, Any] = {"_class_name": "ZImagePipeline", "_diffusers_version": "0.36.0"}
    for name, (library, class_name, config, shapes) in parts.items():
        index[name] = [library, class_name]
        folder = directory / name
        folder.mkdir(parents=True)
        kind = "_class_name" if library == "diffusers" else "model_type"
        named = {kind: class_name if library == "diffusers" else "qwen3", **config}
        (folder / "config.json").write_text(json.dumps(named))
        stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
        write_weights(folder / f"{stem}.safetensors", shapes, dtype)
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory


def _transformer(dim: int, num_layers: int) -> Shapes:
    hidden = int(dim * 8 / 3)
    shapes: Shapes = {"cap_embedder.1.weight": (dim, 2560)}
    names = [f"noise_refiner.{k}" for k in range(2)] + [f"layers.{k}" for k in range(num_layers)]
    for name in names:
        shapes |= {f"{name}.attention.to_{part}.weight": (dim, dim) for part in "qkv"}
        shapes |= {
            f"{name}.attention.to_out.0.weight": (dim, dim),
            f"{name}.feed_forward.w1.weight": (hidden, dim),
            f"{name}.feed_forward.w2.weight": (dim, hidden),
            f"{name}.feed_forward.w3.weight": (hidden, dim),
            f"{name}.attention_norm1.weight": (dim,),
            f"{name}.adaLN_modulation.0.weight": (4 * dim, 256),
        }
    return shapes


def _qwen(hidden: int, wide: int, num_layers: int) -> Shapes:
    shapes: Shapes = {"embed_tokens.weight": (151_936, hidden)}
    for k in range(num_layers):
        shapes |= {
            f"layers.{k}.self_attn.q_proj.weight": (4096, hidden),
            f"layers.{k}.self_attn.k_proj.weight": (1024, hidden),
            f"layers.{k}.self_attn.v_proj.weight": (1024, hidden),
            f"layers.{k}.self_attn.o_proj.weight": (hidden, 4096),
            f"layers.{k}.mlp.gate_proj.weight": (wide, hidden),
            f"layers.{k}.mlp.up_proj.weight": (wide, hidden),
            f"layers.{k}.mlp.down_proj.weight": (hidden, wide),
            f"layers.{k}.input_layernorm.weight": (hidden,),
        }
    return shapes


def _decoder(channels: list[int]) -> Shapes:
    shapes: Shapes = {
        "encoder.conv_in.weight": (128, 3, 3, 3),
        "decoder.conv_in.weight": (channels[0], 16, 3, 3),
        "decoder.conv_out.weight": (3, channels[-1], 3, 3),
    }
    before = channels[0]
    for level, width in enumerate(channels):
        for k in range(3):
            block = f"decoder.up_blocks.{level}.resnets.{k}"
            shapes[f"{block}.conv1.weight"] = (width, before, 3, 3)
            shapes[f"{block}.conv2.weight"] = (width, width, 3, 3)
            before = width
        if level < len(channels) - 1:
            shapes[f"decoder.up_blocks.{level}.upsamplers.0.conv.weight"] = (width, width, 3, 3)
    return shapes

"""Model directories in the diffusers layout with a few bytes of weights, made without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.safetensors_header import TensorBytes, pack

ITEM_NBYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}


def weights(shapes: Mapping[str, Sequence[int]], dtype: str = "BF16") -> bytes:
    """A safetensors file with a tensor of each shape."""
    tensors: dict[str, TensorBytes] = {}
    for position, (name, shape) in enumerate(shapes.items()):
        num_elements = 1
        for size in shape:
            num_elements *= size
        data = bytes([position + 1]) * (num_elements * ITEM_NBYTES[dtype])
        tensors[name] = {"dtype": dtype, "shape": shape, "data": data}
    return pack(tensors, {"format": "pt"})


def write_json(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def write_shards(
    folder: Path, shards: Sequence[Mapping[str, Sequence[int]]], base: str, variant: str = ""
) -> Path:
    """Numbered shards and their index, which is returned."""
    dot = f".{variant}" if variant else ""
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, start=1):
        name = f"{base}{dot}-{number:05}-of-{len(shards):05}.safetensors"
        (folder / name).write_bytes(weights(shapes))
        weight_map |= dict.fromkeys(shapes, name)
    index = folder / f"{base}.safetensors.index{dot}.json"
    return write_json(index, {"metadata": {"total_size": 0}, "weight_map": weight_map})


def write_model(directory: Path) -> Path:
    """A model with a sharded transformer, an encoder, a tokenizer, a scheduler and a VAE."""
    write_json(
        directory / "model_index.json",
        {
            "_class_name": "ZImagePipeline",
            "_diffusers_version": "0.42.1",
            "boundary_ratio": 0.875,
            "layers": [9, 18],
            "safety_checker": [None, None],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen3Model"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "ZImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    )
    write_json(directory / "scheduler" / "scheduler_config.json", {"shift": 3.0})
    write_json(directory / "tokenizer" / "tokenizer_config.json", {"model_max_length": 77})
    write_json(directory / "tokenizer" / "vocab.json", {"a": 0})
    write_json(directory / "text_encoder" / "config.json", {"hidden_size": 8})
    (directory / "text_encoder" / "model.safetensors").write_bytes(
        weights({"embed.weight": (4, 8), "norm.weight": (8,)})
    )
    write_json(directory / "transformer" / "config.json", {"patch_size": 2})
    write_shards(
        directory / "transformer",
        [{"a": (2, 2), "b": (2,)}, {"c": (3, 1)}, {"d": (1,)}],
        "diffusion_pytorch_model",
    )
    write_json(directory / "vae" / "config.json", {"block_out_channels": [4, 8, 8, 8]})
    (directory / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(
        weights({"conv.weight": (2, 2)}, "F32")
    )
    return directory

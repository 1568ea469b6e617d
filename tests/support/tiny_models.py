"""Tiny models with random weights in diffusers layout: seconds to build, no download.

They paint noise; what they are good for is that every bit of it is determined.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "a small red fox in the snow, watercolour",
    "a robot dancing under city lights at night",
    "low quality, blurry",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400) -> Any:
    """A Qwen2 tokenizer whose byte-level merges come from a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    made = transformers.Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


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
        transformer=transformer.to(dtype).eval(),
        vae=vae.to(dtype).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=text_encoder.to(dtype).eval(),
        tokenizer=byte_level_tokenizer(),
    )
    pipeline.save_pretrained(directory)
    return directory

"""How many operations a module's call takes, from the names and shapes of its weights alone.

An operation is one multiplication or one addition. Each weight counts twice at each place that
it is applied to; attention counts its two products of all pairs. Norms, activations and rotations
are left out: they move memory more than they compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

Shapes = Mapping[str, tuple[int, ...]]

_MANY = 16  # an embedding table has so many times more rows than columns
_QUERY = re.compile(r"(to_q|q_proj|add_q_proj|\.q|query|to_qkv|qkv_proj)\.weight$")
_ONCE = re.compile(r"time|norm\w*\.linear|modulation|adaLN|guidance|pooled|scale_shift|emb_proj")
_TEXT = re.compile(
    r"add_[qkv]_proj|to_add_out|ff_context|\.txt_|context_embedder|caption|text_|cap_embedder"
    r"|context_refiner|attn2\.to_[kv]"
)
_LOOKS = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_CROSS = ("attn2.", "add_k_proj.", "add_q_proj.")


def sequence_flops(
    shapes: Shapes,
    num_tokens: int,
    num_text_tokens: int = 0,
    *,
    num_audio_tokens: int = 0,
    num_patches: int = 0,
) -> float:
    """Operations of one call of a transformer.

    Args:
        num_tokens: Of what it works on: latent patches; for a text encoder its tokens.
        num_text_tokens: Of the prompt that a denoiser looks at.
        num_audio_tokens: Of the sound that is denoised with a video.
        num_patches: Of the pictures that a text encoder looks at; 0: that part of it rests.
    """
    separate = {_block(name) for name in shapes if any(f".{part}" in name for part in _CROSS)}
    everything, total = num_tokens + num_text_tokens, 0.0
    for name, shape in shapes.items():
        if len(shape) < 2 or _is_table(shape):
            continue
        apart, is_cross = _block(name) in separate, "attn2." in name
        read = num_tokens if apart else everything
        keys = num_text_tokens if is_cross else everything
        if apart and not _is_joint(name, shapes):
            keys = num_text_tokens if is_cross else num_tokens
        if _LOOKS.search(name):
            read = keys = num_patches
        elif "audio" in name:
            read = keys = num_audio_tokens
        elif num_text_tokens and _TEXT.search(name):
            read = num_text_tokens
        elif _ONCE.search(name):
            read = 1
        total += 2.0 * math.prod(shape) * read
        if (found := _QUERY.search(name)) is not None:
            width = shape[0] // 3 if "qkv" in found[1] else shape[0]
            total += 4.0 * read * keys * width
    return total


def _is_table(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] >= _MANY * shape[1]


def _block(name: str) -> str:
    found = _BLOCK.match(name)
    return found[1] if found else ""


def _is_joint(name: str, shapes: Shapes) -> bool:
    """Whether picture and text attend to each other in this weight's block."""
    return f"{_block(name)}.attn.add_k_proj.weight" in shapes


def unet_flops(shapes: Shapes, rows: int, columns: int, num_text_tokens: int) -> float:
    """Operations of one call of a UNet.

    Args:
        rows: Height of the latents.
        columns: Width of the latents.
    """
    last = max(_numbers(shapes, "down_blocks"), default=0)
    total = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        places = rows * columns / 4 ** unet_level(name, last)
        read = places
        if _TEXT.search(name):
            read = num_text_tokens
        elif re.search(r"time_emb|time_embedding|add_embedding", name):
            read = 1
        total += 2.0 * math.prod(shape) * read
        if _QUERY.search(name):
            keys = num_text_tokens if "attn2." in name else places
            total += 4.0 * places * keys * shape[0]
    return total


def _numbers(names: Iterable[str], part: str) -> set[int]:
    pattern = re.compile(rf"(?:^|\.){part}\.(\d+)\.")
    return {int(found[1]) for name in names if (found := pattern.search(name))}


def unet_level(name: str, last: int) -> int:
    """How often the edge is halved where a UNet's weight is applied."""
    if name.startswith("mid_block."):
        return last
    if found := re.match(r"(down|up)_blocks\.(\d+)\.", name):
        k = int(found[2])
        if found[1] == "down":
            return min(last, k + ("downsamplers" in name))
        return max(0, last - k - ("upsamplers" in name))
    return 0

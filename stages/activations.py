"""What a module's own work takes, from its configuration and the shapes of its weights.

Memory is what eager code holds at its peak, without the workspaces of libraries: attention is
taken to keep no matrix of all pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stages.operations import unet_level

_USUAL_CHANNELS = (128, 256)  # of a decoder's last levels, where its configuration is silent
_MANY = 16  # an embedding table has so many times more rows than columns


def vae_activation_bytes(
    config: Mapping[str, Any], height: int, width: int, item_bytes: int, *, num_frames: int = 1
) -> int:
    """What a decode, or an encode, holds at its peak: about its last block, at full resolution.

    Args:
        config: The VAE's configuration.
        height: Pixels.
        item_bytes: Bytes of an element of the compute dtype.
        num_frames: Of the video; 1 for a picture.
    """
    found = config.get("decoder_block_out_channels") or config.get("block_out_channels")
    channels = [int(each) for each in found] if isinstance(found, list) and found else None
    last, before = (channels or _USUAL_CHANNELS)[0], (channels or _USUAL_CHANNELS)[:2][-1]
    if isinstance(base := config.get("base_dim"), int):
        last = base
    pixels = height * width
    copies, at_a_time = _VIDEO_COPIES.get(str(config.get("_class_name")), (0.0, None))
    if not copies:
        # The block's input, with either its normalised and its activated copy, or what a residual
        # sum needs: both summands, the sum, and the sum once scaled.
        return num_frames * pixels * item_bytes * (before + max(2 * before, 4 * last))
    patch = config.get("patch_size")
    pixels_each = pixels / (patch**2 if isinstance(patch, int) else 1)
    frames = min(num_frames, at_a_time or num_frames)
    finished = 2 * 3 * pixels * num_frames  # the frames so far, and the same with the next ones
    return int(item_bytes * (copies * last * pixels_each * frames + finished))


# How many copies of their last block's width these decoders hold for each frame that they have in
# hand, by what torch allocates for the published configurations; and how many frames these are,
# None for all.
_VIDEO_COPIES: dict[str, tuple[float, int | None]] = {
    "AutoencoderDC": (6.5, None),
    "AutoencoderKLCogVideoX": (15.2, 8),
    "AutoencoderKLHunyuanVideo15": (7.0, None),
    "AutoencoderKLLTX2Video": (2.7, None),
    "AutoencoderKLLTXVideo": (6.3, None),
    "AutoencoderKLQwenImage": (18.0, 1),
    "AutoencoderKLWan": (12.8, 4),
}


def unet_activation_bytes(
    shapes: Mapping[str, tuple[int, ...]], rows: int, columns: int, item_bytes: int
) -> int:
    """What a UNet holds at its peak: its widest layer, and what its way down keeps for the way up.

    Args:
        shapes: Shape of each weight by name.
        rows: Height of the latents.
        columns: Width of the latents.
    """
    last = max((int(m[1]) for name in shapes if (m := _DOWN_BLOCK.search(name))), default=0)
    kept = widest = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        places = rows * columns / 4 ** unet_level(name, last)
        if _KEPT.search(name):
            kept += shape[0] * places
        if len(shape) == 4 and "resnets" in name:
            widest = max(widest, 3 * shape[1] * places)
        elif ".ff.net.0." in name:
            widest = max(widest, (2 * shape[0] + 3 * shape[1]) * places)
    return int(item_bytes * (kept + widest))


_DOWN_BLOCK = re.compile(r"^down_blocks\.(\d+)\.")
_KEPT = re.compile(r"^(conv_in|down_blocks\.\d+\.(resnets\.\d+\.conv2|downsamplers\.0\.conv))\.")


def sequence_activation_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    num_tokens: int,
    item_bytes: int,
    *,
    num_kept_states: int = 0,
) -> int:
    """What a transformer holds at its peak: in its widest feed-forward layer.

    Args:
        shapes: Shape of each weight by name.
        num_kept_states: Layers whose output is kept to the end, as text encoders do.
    """
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] < _MANY * shape[1]
    }
    if not matrices:
        return 0
    # Most matrices read the stream of tokens; others work on a time or a table.
    width = Counter(shape[1] for shape in matrices.values()).most_common(1)[0][0]
    fed = [shape[0] for shape in matrices.values() if shape[1] == width]
    widest = max(fed)
    is_gated = _is_gated(matrices, (widest, width))
    live = (4 if is_gated else 2) * widest + (3 + num_kept_states) * width
    return live * num_tokens * item_bytes


def _is_gated(matrices: Mapping[str, tuple[int, ...]], shape: tuple[int, int]) -> bool:
    """Whether a feed-forward layer has two matrices of its widest shape side by side."""
    places = Counter(
        name.rpartition(".")[0].rpartition(".")[0]
        for name, found in matrices.items()
        if found == shape
    )
    return max(places.values()) > 1

"""What a module's own work takes, from its configuration and the shapes of its weights.

Memory is what eager code holds at its peak, without the workspaces of libraries: attention is
taken to keep no matrix of all pairs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_USUAL_CHANNELS = (128, 256)  # of a decoder's last levels, where its configuration is silent
_MANY = 16  # an embedding table has so many times more rows than columns


def decoder_flops(shapes: Mapping[str, tuple[int, ...]], rows: int, columns: int) -> float:
    """Operations of one decode: two for each weight at each place that it is applied to.

    Args:
        shapes: Shape of each weight by name; those of the encoder are left out.
        rows: Height of the latents; each up block works at twice the edge of the one before.
    """
    total = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2 or name.startswith(("encoder.", "quant_conv.")):
            continue
        total += 2.0 * math.prod(shape) * rows * columns * 4 ** _level(name, shapes)
    return total


def _level(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How often the edge has doubled where this weight is applied."""
    last = max((int(m[1]) for each in shapes if (m := _UP_BLOCK.search(each))), default=0)
    found = _UP_BLOCK.search(name)
    if found is not None:
        return min(last, int(found[1]) + ("upsample" in name))
    return last if ".conv_out." in name or ".conv_norm_out." in name else 0


_UP_BLOCK = re.compile(r"decoder\.up_blocks\.(\d+)\.")


def decoder_activation_bytes(
    config: Mapping[str, Any], height: int, width: int, item_bytes: int
) -> int:
    """What a decode holds at its peak: in its last block, at full resolution.

    Args:
        height: Pixels.
        item_bytes: Bytes of an element of the compute dtype.
    """
    found = config.get("decoder_block_out_channels") or config.get("block_out_channels")
    channels = [int(each) for each in found] if isinstance(found, list) and found else None
    last, before = (channels or _USUAL_CHANNELS)[0], (channels or _USUAL_CHANNELS)[:2][-1]
    # The block's input, with either its normalised and its activated copy, or what a residual
    # sum needs: both summands, the sum, and the sum once scaled.
    live = before + max(2 * before, 4 * last)
    return live * height * width * item_bytes


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

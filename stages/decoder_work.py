"""What decoding a picture costs a VAE, from its configuration and the shapes of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# At full resolution: a layer's input, its normalised copy, its output.
_LIVE_COPIES = 3
_USUAL_CHANNELS = 256  # at full resolution, where a configuration does not tell


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
    """Estimate of a decode's own memory: the widest layer at full resolution, thrice.

    Args:
        height: Pixels.
        item_bytes: Bytes of an element of the compute dtype.
    """
    channels = config.get("decoder_block_out_channels") or config.get("block_out_channels")
    widest = _USUAL_CHANNELS
    if isinstance(channels, list) and channels:
        # The last up block takes what the block before it has made and doubled.
        widest = max(int(each) for each in channels[:2])
    return _LIVE_COPIES * widest * height * width * item_bytes

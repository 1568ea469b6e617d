"""How many operations a VAE takes, from the names and shapes of its weights alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SCALES = re.compile(r"upsampl|downsampl|resample|time_conv")
_QUERY = re.compile(r"(to_q|query|\.q)\.weight$")


def vae_flops(
    shapes: Mapping[str, tuple[int, ...]],
    rows: int,
    columns: int,
    *,
    scale: int,
    patch: int = 1,
    num_frames: int = 1,
    packed: int = 1,
    encodes: bool = False,
) -> float:
    """Operations of one decode, or one encode: two for each weight at each place.

    Args:
        shapes: Shape of each weight by name.
        rows: Height of the latents.
        columns: Width of the latents.
        scale: Pixels along an edge for each latent element.
        patch: Pixels of those that the VAE packs into channels before it computes anything.
        num_frames: Of the video; 1 for a picture.
        packed: Frames for each latent frame after the first one.
    """
    part = "encoder" if encodes else "decoder"
    own = {name: shape for name, shape in shapes.items() if name.startswith(f"{part}.")}
    levels = _Levels(own, int(math.log2(scale / patch)), encodes=encodes)
    latent_frames = (num_frames - 1) // packed + 1
    total = 0.0
    for name, shape in own.items():
        if len(shape) < 2:
            continue
        level = levels.of(name, shape)
        frames = min(num_frames, latent_frames * min(packed, 2**level))
        places = rows * columns * 4**level
        total += 2.0 * math.prod(shape) * places * frames
        if _QUERY.search(name):
            total += 4.0 * places**2 * frames * shape[0]
    return total


class _Levels:
    """How often the edge has doubled, from the latents on, where each weight is applied."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], most: int, *, encodes: bool) -> None:
        self._most, self._encodes = most, encodes
        self._block = re.compile(rf"\.{'down' if encodes else 'up'}_blocks\.(\d+)\.")
        blocks = {int(m[1]) for name in shapes if (m := self._block.search(name))}
        self._scaling = {
            int(m[1]) for name in shapes if _SCALES.search(name) and (m := self._block.search(name))
        }
        # Blocks that name no layer for it change the edge all the same; such a decoder's are
        # listed from the pixels on.
        self._is_silent = not self._scaling
        self._leads = bool(blocks) and not encodes and max(blocks) in self._scaling

    def of(self, name: str, shape: tuple[int, ...]) -> int:
        found = self._block.search(name)
        if found is None:
            at_pixels = "conv_in." if self._encodes else "conv_out."
            return self._most if at_pixels in name else 0
        k, is_scaling = int(found[1]), bool(_SCALES.search(name))
        if self._is_silent:
            return max(0, self._most - k)
        done = len([block for block in self._scaling if block < k])
        if self._encodes:
            # What unpacks pixels into channels is applied before; a stride gives the lower edge.
            halves = is_scaling and shape[0] >= shape[1]
            halves = halves or (k in self._scaling and ".conv_out." in name)
            return max(0, self._most - done - halves)
        comes_after = self._leads and k in self._scaling and not is_scaling
        comes_after = comes_after and ".conv_in." not in name
        # Convolutions that make channels for pixels are applied before those are spread.
        is_spread = is_scaling and "time_conv" not in name and shape[0] <= shape[1]
        return min(self._most, done + (comes_after or is_spread))

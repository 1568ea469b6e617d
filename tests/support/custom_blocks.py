"""Folders of custom blocks for tests: a denoising loop of Z-Image's that damps its latents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ENTRY = "block.Damped"

DAMPED = {
    "modular_config.json": json.dumps({"auto_map": {"ModularPipelineBlocks": ENTRY}}),
    "block.py": '''
"""Z-Image's denoising loop, each step of which makes the latents a little fainter."""

from diffusers.modular_pipelines import InputParam
from diffusers.modular_pipelines.z_image.denoise import ZImageDenoiseStep

from .math_of.damping import damped


class Damped(ZImageDenoiseStep):
    @property
    def loop_inputs(self):
        return [*super().loop_inputs, InputParam("damping", default=0.9)]

    def loop_step(self, components, block_state, **position):
        components, block_state = super().loop_step(components, block_state, **position)
        block_state.latents = damped(block_state.latents, block_state.damping)
        return components, block_state
''',
    "math_of/damping.py": "def damped(latents, factor):\n    return latents * factor\n",
}
"""Text of each file, by its path."""


def write_blocks(directory: Path, files: Mapping[str, str] = DAMPED) -> Path:
    """Write a folder of blocks."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def marker_line(path: Path) -> str:
    """A line of Python that leaves a file behind when it runs."""
    return f"\nopen({str(path)!r}, 'w').close()\n"

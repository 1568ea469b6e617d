"""Decode: `latents` to pictures, each a PNG whose bytes depend on its pixels alone."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from stages.contracts import StageContext, StageRequest, StageResult
from stages.execute import Events, finish, loaded_pipe, open_job, run_job
from stages.latents import check_latents


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Decode the latents of one request into one PNG a picture, named `image-0`, `image-1`...

    Raises:
        BorderError: The latents belong to another VAE, or the pixels are NaN or constant; no
            picture is written.
    """
    job = open_job(request, context, events)
    pipe = loaded_pipe(job)
    for facts in job.facts.values():
        check_latents(pipe, facts)
    job.options["output_type"] = "pt"
    events.progress("running")
    made = run_job(job, pipe)
    events.progress("writing")
    with job.tracker.host_phase("write"):
        pictures = [encode_png(pixels_CHW) for pixels_CHW in made.values[job.family.output]]
        refs = {
            f"image-{index}": job.store.put(png, "image/png") for index, png in enumerate(pictures)
        }
    return finish(job, refs)


def encode_png(pixels_CHW: torch.Tensor) -> bytes:  # noqa: N803 - the shape rides in the name
    """A PNG of one picture.

    Args:
        pixels_CHW: Values in [0, 1], shape `(3, H, W)`, any float dtype.
    """
    pixels_HWC = pixels_CHW.float().permute(1, 2, 0).cpu().numpy()  # noqa: N806
    levels = (pixels_HWC * 255).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, format="PNG")
    return buffer.getvalue()

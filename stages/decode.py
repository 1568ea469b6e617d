"""Decode: `latents` to pictures, each a PNG whose bytes depend on its pixels alone.

Decoding in tiles takes less memory and gives other pixels, so it is an option of the request:
its result has a key of its own, and an artifact `tiling` beside the pictures says what was done.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image

from stages.borders import faint_sentence
from stages.contracts import StageContext, StageRequest, StageResult, canonical_json
from stages.errors import RequestError
from stages.execute import Events, finish, loaded_pipe, open_job, run_job
from stages.latents import check_latents

TILING = "tiling"


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Decode the latents of one request into one PNG a picture, named `image-0`, `image-1`...

    The option `tiling` decodes in tiles that are blended where they meet.

    Raises:
        RequestError: `tiling` is asked of a VAE that has none.
        BorderError: The latents belong to another VAE or have another form, or the pixels are
            NaN or constant; no picture is written.
    """
    job = open_job(request, context, events)
    is_tiled = bool(job.options.pop(TILING, False))
    pipe = loaded_pipe(job)
    for facts in job.facts.values():
        check_latents(pipe, facts, job.handed.values)
    job.options["output_type"] = "pt"
    events.progress("running")
    tiles: dict[str, Any] = {}
    with ExitStack() as stack:
        if is_tiled:
            tiles = stack.enter_context(in_tiles(pipe.vae))
        made = run_job(job, pipe)
    for index, pixels_CHW in enumerate(made.values[job.family.output]):  # noqa: N806 - its shape
        if sentence := faint_sentence(f"image-{index}", pixels_CHW):
            job.tracker.warnings.append(sentence)
            events.warn(sentence)
    events.progress("writing")
    with job.tracker.host_phase("write"):
        pictures = [encode_png(pixels_CHW) for pixels_CHW in made.values[job.family.output]]
        refs = {
            f"image-{index}": job.store.put(png, "image/png") for index, png in enumerate(pictures)
        }
        if is_tiled:
            refs[TILING] = job.store.put(canonical_json(tiles), "application/json")
    return finish(job, refs)


@contextmanager
def in_tiles(vae: Any) -> Iterator[dict[str, Any]]:
    """While open, a VAE decodes in tiles; gives their numbers by the VAE's own names.

    Raises:
        RequestError: This class of VAE has no tiles.
    """
    try:
        vae.enable_tiling()
    except (AttributeError, NotImplementedError) as error:
        raise RequestError(
            f"{type(vae).__name__} cannot decode in tiles; leave out the option {TILING}"
        ) from error
    try:
        numbers = {name: n for name, n in vars(vae).items() if name.startswith("tile_")}
        yield {"vae": type(vae).__name__, **dict(sorted(numbers.items()))}
    finally:
        vae.disable_tiling()


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

"""Decode: `latents` to pictures or videos, each a file whose bytes depend on its content alone.

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

from stages.borders import check_border, faint_sentence
from stages.contracts import StageContext, StageRequest, StageResult, canonical_json
from stages.errors import RequestError
from stages.execute import Events, finish, loaded_pipe, open_job, run_job
from stages.latents import check_latents
from stages.mp4 import MEDIA_TYPE, check_frame_rate
from stages.videos import FRAME_RATE, encode_videos, glance

TILING = "tiling"


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Decode the latents of one request into files.

    One PNG a picture, named `image-0`, `image-1`..., or one MP4 a video, `video-0` and so on,
    with its sound. The option `tiling` decodes in tiles that are blended where they meet;
    `frame_rate` says how many frames a second a video has.

    Raises:
        RequestError: `tiling` is asked of a VAE that has none, or a video has no `frame_rate`.
        BorderError: The latents belong to another VAE or have another form, or the pixels are
            NaN or constant; no picture is written.
    """
    job = open_job(request, context, events)

    def warn(sentence: str) -> None:
        job.tracker.warnings.append(sentence)
        events.warn(sentence)

    is_tiled = bool(job.options.pop(TILING, False))
    is_video = job.family.output == "videos"
    frame_rate = check_frame_rate(job.options.pop(FRAME_RATE, None)) if is_video else 0.0
    pipe = loaded_pipe(job)
    for facts in job.facts.values():
        check_latents(pipe, facts, job.handed.values, job.family.layout)
    is_cropped = job.options.get("padding_mask_crop") is not None
    is_finished = is_cropped or request.task in job.family.finished
    job.options["output_type"] = "pil" if is_finished else "pt"
    events.progress("running")
    tiles: dict[str, Any] = {}
    with ExitStack() as stack:
        if is_tiled:
            tiles = stack.enter_context(in_tiles(pipe.vae))
        if is_finished:  # whose pixels are past checking
            stack.enter_context(_decoded_values_checked(pipe.vae))
        made = run_job(job, pipe)
    products = made.values[job.family.output]
    noun = "video" if is_video else "image"
    pictures_CHW = [glance(each) if is_video else _as_tensor(each) for each in products]  # noqa: N806
    for index, pixels_CHW in enumerate(pictures_CHW):  # noqa: N806 - its shape
        if sentence := faint_sentence(f"{noun}-{index}", pixels_CHW):
            warn(sentence)
    events.progress("writing")
    with job.tracker.host_phase("write"):
        if is_video:
            files = encode_videos(job.family, pipe, made.values, frame_rate, warn)
            kind = MEDIA_TYPE
        else:
            files, kind = [encode_png(pixels_CHW) for pixels_CHW in pictures_CHW], "image/png"
        refs = {f"{noun}-{index}": job.store.put(file, kind) for index, file in enumerate(files)}
        if is_tiled:
            refs[TILING] = job.store.put(canonical_json(tiles), "application/json")
    return finish(job, refs)


@contextmanager
def _decoded_values_checked(vae: Any) -> Iterator[None]:
    """While open, what a VAE decodes is held to the rules of a border."""
    decode = vae.decode

    def checked(*arguments: Any, **options: Any) -> Any:
        made = decode(*arguments, **options)
        check_border("decode", {"sample": made[0]})
        return made

    vae.decode = checked
    try:
        yield
    finally:
        del vae.decode


def _as_tensor(picture: Any) -> torch.Tensor:
    """A picture's values in [0, 1], shape `(3, H, W)`; of finished pixels, exact to the level."""
    if isinstance(picture, torch.Tensor):
        return picture
    return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1) / 255


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

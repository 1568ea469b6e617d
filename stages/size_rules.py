"""Rules for the size of pictures, computed from component configurations; loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stages.errors import ModelError, RequestError
from stages.text_rules import kind, shown

SIZE_LIMIT_BYTES = 64 * 2**30
"""What the decoder's widest layer may take for one picture: 11,585 x 11,585 pixels at 512
bytes a pixel. No run of that size ends; the limit is there to refuse typing errors at once."""

BYTES_PER_PIXEL = 512
"""One float32 layer of 128 channels at full resolution, as the usual decoders have."""


MOST_AREA = 2
"""Times the area that a model was trained at, up to which a picture's own size is kept: beyond
it, most models repeat what they paint."""


def spatial_multiple(vae: Mapping[str, Any], denoiser: Mapping[str, Any]) -> int:
    """What height and width must be multiples of: VAE scale x patch, in pixels.

    Args:
        vae: The VAE's configuration.
        denoiser: The configuration of the transformer or UNet.

    Raises:
        ModelError: The VAE's configuration does not tell its scale.
    """
    return vae_scale(vae) * max(_patch(denoiser), _packing(vae, denoiser))


def vae_scale(vae: Mapping[str, Any]) -> int:
    """Pixels along an edge for each latent element.

    Raises:
        ModelError: The configuration does not tell.
    """
    for name in ("spatial_compression_ratio", "scale_factor_spatial"):
        if isinstance(vae.get(name), int):
            return int(vae[name])
    if isinstance(scaling := vae.get("spatio_temporal_scaling"), list):
        return int(2 ** sum(map(bool, scaling)) * _last(vae.get("patch_size")))
    if isinstance(downsample := vae.get("temperal_downsample"), list):
        return int(2 ** len(downsample))  # one halving of the edges per entry, true or not
    for name in ("encoder_block_out_channels", "block_out_channels"):
        if isinstance(channels := vae.get(name), list) and channels:
            return int(2 ** (len(channels) - 1))
    raise ModelError(
        f"configuration of {vae.get('_class_name', 'the VAE')} does not tell its scale: "
        "neither block_out_channels nor a compression ratio is in it"
    )


def temporal_multiple(vae: Mapping[str, Any]) -> int:
    """Frames for each latent frame after the first one.

    Raises:
        ModelError: The configuration does not tell.
    """
    for name in ("temporal_compression_ratio", "scale_factor_temporal"):
        if isinstance(vae.get(name), int):
            return int(vae[name])
    if isinstance(scaling := vae.get("spatio_temporal_scaling"), list):
        return int(2 ** sum(map(bool, scaling)) * int(vae.get("patch_size_t") or 1))
    if isinstance(downsample := vae.get("temperal_downsample"), list):
        return int(2 ** sum(map(bool, downsample)))
    raise ModelError(
        f"configuration of {vae.get('_class_name', 'the VAE')} does not tell how it compresses "
        "time: neither a compression ratio nor a list of scalings is in it"
    )


def trained_edge(vae: Mapping[str, Any], sized_by: Mapping[str, Any], edge: int) -> int:
    """Pixels along an edge that a model was trained at.

    Args:
        sized_by: The configuration whose `sample_size` tells: the VAE's in pixels, any other
            in latents.
        edge: The answer where it does not tell.
    """
    size = sized_by.get("sample_size")
    if not isinstance(size, int):
        return edge
    return size if sized_by is vae else size * vae_scale(vae)


def _patch(denoiser: Mapping[str, Any]) -> int:
    """Latent elements along an edge of one token; 1 for UNets."""
    if isinstance(sizes := denoiser.get("all_patch_size"), list) and sizes:
        return max(int(size) for size in sizes)
    return _last(denoiser.get("patch_size"))


def _packing(vae: Mapping[str, Any], denoiser: Mapping[str, Any]) -> int:
    """Edge of the latent squares that are packed into channels before the denoiser.

    No configuration states it: it shows in the denoiser's channels being a square times the
    VAE's. Where the pipeline packs by the denoiser's patch size, both say the same.
    """
    latent = vae.get("latent_channels") or vae.get("z_dim")
    channels = denoiser.get("out_channels") or denoiser.get("in_channels")
    if not isinstance(latent, int) or not isinstance(channels, int) or channels % latent:
        return 1
    edge = math.isqrt(channels // latent)
    return edge if edge**2 * latent == channels else 1


def _last(size: Any) -> int:
    """The width of a patch given as one number, (height, width) or (frames, height, width)."""
    if isinstance(size, list | tuple) and size:
        size = size[-1]
    return size if type(size) is int and size > 0 else 1


def check_size(
    height: object,
    width: object,
    multiple: int,
    *,
    num_frames: int = 1,
    bytes_per_pixel: int = BYTES_PER_PIXEL,
    limit_bytes: int = SIZE_LIMIT_BYTES,
) -> tuple[int, int]:
    """Height and width in pixels, each a multiple of `multiple` and together below a limit.

    Args:
        num_frames: Frames that are decoded at a time.
        bytes_per_pixel: Estimated memory of the widest layer for one pixel of one frame.
        limit_bytes: What height x width x frames x bytes_per_pixel may come to.

    Raises:
        RequestError: With the two nearest valid values of each wrong one.
    """
    check_edges(height, width, multiple)
    height, width = whole_number(height, "height"), whole_number(width, "width")
    nbytes = height * width * num_frames * bytes_per_pixel
    if nbytes > limit_bytes:
        frames = f" x {num_frames} frames" if num_frames > 1 else ""
        raise RequestError(
            f"size {width} x {height}{frames} needs about {nbytes / 2**30:.0f} GiB to decode, "
            f"{limit_bytes / 2**30:.0f} GiB are allowed; choose a smaller size"
        )
    return height, width


def check_edges(height: object, width: object, multiple: int) -> None:
    """Refuse edges that are no multiple of `multiple` pixels; one that is None passes.

    Raises:
        RequestError: With the two nearest valid values of each wrong one.
    """
    given = {"height": height, "width": width}
    edges = {name: whole_number(edge, name) for name, edge in given.items() if edge is not None}
    wrong = [
        f"{name} {value} is not a multiple of {multiple} pixels, use {_nearest(value, multiple)}"
        for name, value in edges.items()
        if value < multiple or value % multiple
    ]
    if wrong:
        raise RequestError("; ".join(wrong))


def size_like(
    picture: tuple[int, int],
    multiple: int,
    edge: int,
    *,
    height: int | None = None,
    width: int | None = None,
    fills: bool = False,
) -> tuple[int, int]:
    """Height and width for a picture that starts from another one, in pixels.

    One that is given stays, and the other follows the aspect ratio. Where none is given, it is
    the size of the picture; that of a picture with more than twice the pixels that the model was
    trained at comes down to those.

    Args:
        picture: Width and height of the picture to start from.
        multiple: What height and width must be multiples of; the nearest one is taken.
        edge: Pixels along an edge that the model was trained at.
        fills: Whether a smaller picture comes up to that size, too.
    """
    aspect = picture[0] / picture[1]
    if height is not None and width is not None:
        return height, width
    if height is not None:
        return height, _rounded(height * aspect, multiple)
    if width is not None:
        return _rounded(width / aspect, multiple), width
    area = picture[0] * picture[1]
    if fills or area > MOST_AREA * edge**2:
        area = edge**2
    return (
        _rounded(math.sqrt(area / aspect), multiple),
        _rounded(math.sqrt(area * aspect), multiple),
    )


def _rounded(pixels: float, multiple: int) -> int:
    return max(1, math.floor(pixels / multiple + 0.5)) * multiple


def check_num_frames(num_frames: object, multiple: int) -> int:
    """A number of frames that a VAE can hold: 1, and multiples of `multiple` after it.

    Raises:
        RequestError: With the two nearest valid numbers.
    """
    number = whole_number(num_frames, "num_frames")
    if number >= 1 and (number - 1) % multiple == 0:
        return number
    nearest = "1"
    if number > 1:
        below = (number - 1) // multiple * multiple + 1
        nearest = f"{below} or {below + multiple}"
    raise RequestError(
        f"num_frames is {number}, but this model's videos have {multiple}k+1 frames, use {nearest}"
    )


def _nearest(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below > 0 else f"{multiple}"


def whole_number(value: object, name: str) -> int:
    """A value that is an integer and no bool.

    Raises:
        RequestError: It is anything else.
    """
    if type(value) is not int:
        raise RequestError(f"{name} is {shown(value)} ({kind(value)}), expected a whole number")
    return value

"""What a request may ask for: each check returns the value to use, or says what would be valid.

Everything is computed from the arguments and from component configurations, so that all
phases are checked before the first one starts. This module loads no torch.
"""

from __future__ import annotations

import math
import re
import secrets

from stages.contracts import MAX_SEED
from stages.errors import RequestError
from stages.size_rules import (
    check_edges,
    check_size,
    size_like,
    spatial_multiple,
    vae_scale,
    whole_number,
)
from stages.text_rules import (
    MAX_PROMPT_CHARACTERS,
    check_prompt,
    check_prompts,
    escape_for_terminal,
    kind,
    shown,
)

__all__ = [
    "DTYPES",
    "MAX_GUIDANCE",
    "MAX_PROMPT_CHARACTERS",
    "MAX_STEPS",
    "check_device_name",
    "check_dtype",
    "check_edges",
    "check_guidance",
    "check_padding",
    "check_prompt",
    "check_prompts",
    "check_seed",
    "check_share",
    "check_size",
    "check_steps",
    "check_strength",
    "check_token_limit",
    "draw_seed",
    "escape_for_terminal",
    "expand_seeds",
    "narrowing_warning",
    "size_like",
    "spatial_multiple",
    "vae_scale",
]

MAX_STEPS = 1000
MAX_GUIDANCE = 100.0
DTYPES = ("float32", "bfloat16", "float16")

DRAWN_SEED_BITS = 53
"""Drawn seeds survive spreadsheets and JSON readers that hold numbers as 64-bit floats."""

_DTYPE_SHORTHANDS = {
    "fp32": "float32", "f32": "float32", "float": "float32", "full": "float32",
    "bf16": "bfloat16", "bfloat": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16",
}  # fmt: skip


# ---- steps, guidance, tokens ---------------------------------------------------------------


def check_steps(num_inference_steps: object, strength: object = None) -> int:
    """Denoising steps that will really run: all of them, or steps x strength rounded down.

    Args:
        strength: Share of the steps that a picture-to-picture run takes, 0 to 1; None for all.

    Raises:
        RequestError: The steps are not 1 to 1000, or none would run.
    """
    steps = whole_number(num_inference_steps, "num_inference_steps")
    if not 0 <= steps <= MAX_STEPS:
        raise RequestError(f"num_inference_steps is {steps}, allowed are 1 to {MAX_STEPS}")
    if strength is None:
        if steps == 0:
            raise RequestError(f"0 denoising steps; use 1 to {MAX_STEPS}")
        return steps
    share = _finite(strength, "strength", 0.0, 1.0)
    if (num_run := min(int(steps * share), steps)) < 1:
        raise RequestError(
            f"0 denoising steps ({steps} x {share:g}); raise num_inference_steps or strength"
        )
    return num_run


def check_strength(strength: object) -> float:
    """A share of the noise, over 0 and at most 1.

    Raises:
        RequestError: It is none.
    """
    share = _finite(strength, "strength", 0.0, 1.0)
    if share == 0.0:
        raise RequestError(
            "strength is 0, which would leave the picture as it is; allowed are over 0 to 1"
        )
    return share


def check_share(value: object, name: str) -> float:
    """A number from 0 to 1.

    Raises:
        RequestError: It is none.
    """
    return _finite(value, name, 0.0, 1.0)


def check_padding(padding_mask_crop: object) -> int:
    """Pixels about a mask, 0 and more.

    Raises:
        RequestError: It is no whole number, or below 0.
    """
    padding = whole_number(padding_mask_crop, "padding_mask_crop")
    if padding < 0:
        raise RequestError(f"padding_mask_crop is {padding} pixels, allowed are 0 and more")
    return padding


def check_guidance(guidance_scale: object, name: str = "guidance_scale") -> float:
    """A guidance scale, finite and 0 to 100.

    Raises:
        RequestError: It is none.
    """
    return _finite(guidance_scale, name, 0.0, MAX_GUIDANCE)


def _finite(value: object, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {shown(value)} ({kind(value)}), expected a number")
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value}, allowed are {low:g} to {high:g}")
    return float(value)


def check_token_limit(max_sequence_length: object, limit: int) -> int:
    """How many tokens of a prompt are read, 1 to `limit`.

    Raises:
        RequestError: It is out of that range, or no whole number.
    """
    tokens = whole_number(max_sequence_length, "max_sequence_length")
    if not 1 <= tokens <= limit:
        raise RequestError(f"max_sequence_length is {tokens} tokens, allowed are 1 to {limit}")
    return tokens


# ---- seeds ---------------------------------------------------------------------------------


def check_seed(seed: object) -> int:
    """A seed, exact: 0 to 2**64 - 1, or -1 to have one drawn.

    Args:
        seed: A whole number, or its decimal digits as text.

    Raises:
        RequestError: It is a float or a bool, out of range, or not a whole number.
    """
    if isinstance(seed, float):
        raise RequestError(
            f"seed is {seed!r} (float), which cannot hold every seed exactly; "
            "give a whole number, or its digits as text"
        )
    if isinstance(seed, str):
        text = seed
        if not re.fullmatch(r"-?[0-9]{1,40}", text):
            raise RequestError(
                f"seed is the text {shown(text)}, expected decimal digits, 0 to {MAX_SEED}, or -1"
            )
        seed = int(text)
    if type(seed) is not int:
        raise RequestError(
            f"seed is {shown(seed)} ({kind(seed)}), expected a whole number, 0 to {MAX_SEED}, "
            "or -1 to draw one"
        )
    if not -1 <= seed <= MAX_SEED:
        raise RequestError(f"seed is {seed}, allowed are 0 to {MAX_SEED}, or -1 to draw one")
    return seed


def draw_seed() -> int:
    """A seed from the system's random source, 0 to 2**53 - 1."""
    return secrets.randbits(DRAWN_SEED_BITS)


def expand_seeds(seed: int, num_images: object) -> list[int]:
    """One seed per image: `seed`, `seed + 1` and so on; -1 draws the first one.

    Raises:
        RequestError: `num_images` is below 1, or the last seed would exceed 2**64 - 1.
    """
    count = whole_number(num_images, "num_images")
    if count < 1:
        raise RequestError(f"num_images is {count}, expected at least 1")
    first = draw_seed() if seed == -1 else check_seed(seed)
    if first + count - 1 > MAX_SEED:
        raise RequestError(
            f"{count} images from seed {first} need seeds up to {first + count - 1}, allowed are "
            f"0 to {MAX_SEED}; start at {MAX_SEED - count + 1} or below"
        )
    return list(range(first, first + count))


# ---- dtypes and devices --------------------------------------------------------------------


def check_dtype(dtype: object, file_dtype: str | None = None) -> str:
    """The compute dtype by torch's name.

    Args:
        dtype: float32, bfloat16 or float16, spelt like that; or auto.
        file_dtype: What auto stands for: the dtype of the model's files. One that nothing
            computes in, or none, stands for bfloat16 and float32.

    Raises:
        RequestError: It is none of these.
    """
    if dtype == "auto":
        if file_dtype is None:
            return "float32"
        return file_dtype if file_dtype in DTYPES else "bfloat16"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        key = re.sub(r"[\s_-]", "", str(dtype)).lower().removeprefix("torch.")
        meant = _DTYPE_SHORTHANDS.get(key, key)
        hint = f"; did you mean {meant}?" if meant in DTYPES else ""
        raise RequestError(
            f"dtype is {shown(dtype)}, allowed are {', '.join(DTYPES)} and auto{hint}"
        )
    return dtype


def narrowing_warning(dtype: str, file_dtype: str | None) -> str | None:
    """What float16 may cost weights of a wider range; None where nothing is narrowed.

    Args:
        dtype: The compute dtype by torch's name.
        file_dtype: That of the model's files.
    """
    if dtype != "float16" or file_dtype not in ("bfloat16", "float32"):
        return None
    return (
        f"dtype is float16 and the model's weights are {file_dtype}: what goes beyond 65504 while "
        "it computes becomes infinite; dtype auto keeps the range"
    )


def check_device_name(device: object) -> str:
    """A device's name; whether it is there is seen by the stage that uses it.

    Raises:
        RequestError: It is not `cpu`, `cuda` or `cuda:N`.
    """
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", device):
        raise RequestError(f"device is {shown(device)}, allowed are cpu, cuda and cuda:N")
    return device

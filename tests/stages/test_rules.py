"""Requests are checked against the models' own configurations, with what would be valid."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import rules
from stages.contracts import MAX_SEED
from stages.errors import ModelError, RequestError

KL = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16}
FLUX_2_VAE = KL | {"latent_channels": 32, "patch_size": [2, 2]}
QWEN_VAE = {"temperal_downsample": [False, True, True], "z_dim": 16}
WAN_22_VAE = {"scale_factor_spatial": 16, "z_dim": 48, "patch_size": 2}
LTX_VAE = {"spatio_temporal_scaling": [True, True, True, False], "patch_size": 4}
DC_VAE = {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32}


@pytest.mark.parametrize(
    ("vae", "denoiser", "expected"),
    [
        (KL | {"latent_channels": 4}, {"in_channels": 4, "out_channels": 4}, 8),  # a UNet
        (KL | {"latent_channels": 4}, {"in_channels": 9, "out_channels": 4}, 8),  # inpainting
        (KL, {"patch_size": 2, "in_channels": 16, "out_channels": 16}, 16),
        (KL, {"all_patch_size": [2], "in_channels": 16}, 16),
        (KL, {"all_patch_size": [2, 4], "in_channels": 16}, 32),
        (KL, {"patch_size": 1, "in_channels": 64, "out_channels": None}, 16),  # packed
        (KL, {"patch_size": 1, "in_channels": 384, "out_channels": 64}, 16),  # packed, filling
        (FLUX_2_VAE, {"patch_size": 1, "in_channels": 128}, 16),
        (QWEN_VAE, {"patch_size": 2, "in_channels": 64, "out_channels": 16}, 16),
        (QWEN_VAE, {"patch_size": [1, 2, 2], "in_channels": 36, "out_channels": 16}, 16),
        (WAN_22_VAE, {"patch_size": [1, 2, 2], "in_channels": 48}, 32),
        (LTX_VAE, {"patch_size": 1, "in_channels": 128}, 32),
        (DC_VAE, {"patch_size": 1, "in_channels": 32}, 32),
        ({"spatial_compression_ratio": 16, "latent_channels": 32}, {"in_channels": 65}, 16),
    ],
)
def test_the_multiple_is_vae_scale_times_patch(
    vae: dict[str, Any], denoiser: dict[str, Any], expected: int
) -> None:
    assert rules.spatial_multiple(vae, denoiser) == expected


def test_a_vae_that_does_not_tell_its_scale_is_an_error() -> None:
    with pytest.raises(ModelError, match="configuration of Odd does not tell its scale"):
        rules.spatial_multiple({"_class_name": "Odd"}, {})


# ---- sizes ---------------------------------------------------------------------------------


def test_valid_sizes_come_back_unchanged() -> None:
    assert rules.check_size(512, 768, 32) == (512, 768)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (496, 624, "height 496 is not a multiple of 32 pixels, use 480 or 512; width 624 is not a "
                   "multiple of 32 pixels, use 608 or 640"),
        (512, 777, "width 777 is not a multiple of 32 pixels, use 768 or 800"),
        (16, 512, "height 16 is not a multiple of 32 pixels, use 32"),
        (0, 512, "height 0 is not a multiple of 32 pixels, use 32"),
        (-32, 512, "height -32 is not a multiple of 32 pixels, use 32"),
        (512.0, 512, r"height is 512.0 (float), expected a whole number"),
        (True, 512, "height is True (bool), expected a whole number"),
        ("512", 512, "height is '512' (str), expected a whole number"),
        (None, 512, "height is None (null), expected a whole number"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_refused_with_the_nearest_valid_ones(
    height: object, width: object, expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        rules.check_size(height, width, 32)
    assert str(caught.value) == expected


@given(value=st.integers(1, 5000), multiple=st.sampled_from([8, 16, 32]))
def test_the_values_in_the_message_are_the_nearest_valid_ones(value: int, multiple: int) -> None:
    valid = range(multiple, 8000, multiple)
    try:
        assert rules.check_size(value, multiple, multiple) == (value, multiple)
        assert value in valid
    except RequestError as error:
        offered = [int(word) for word in str(error).partition(" use ")[2].split(" or ")]
        below = [size for size in valid if size < value]
        above = [size for size in valid if size > value]
        assert offered == below[-1:] + above[:1]


@pytest.mark.parametrize(("size", "num_frames"), [(65536, 1), (10**30 * 16, 1), (512, 10**6)])
def test_sizes_that_no_machine_holds_are_refused_by_arithmetic(size: int, num_frames: int) -> None:
    with pytest.raises(RequestError, match=r"needs about \d+ GiB to decode, 64 GiB are allowed"):
        rules.check_size(size, size, 16, num_frames=num_frames)


# ---- steps, guidance, tokens ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "strength", "expected"),
    [(20, None, 20), (1000, None, 1000), (20, 0.5, 10), (20, 1.0, 20), (15, 0.1, 1), (1, 1, 1)],
)
def test_the_steps_that_run_are_told(steps: int, strength: float | None, expected: int) -> None:
    assert rules.check_steps(steps, strength) == expected


@pytest.mark.parametrize(
    ("steps", "strength", "expected"),
    [
        (15, 0.05, r"^0 denoising steps \(15 x 0\.05\)"),
        (1, 0.99, r"^0 denoising steps \(1 x 0\.99\)"),
        (0, 0.5, r"^0 denoising steps \(0 x 0\.5\)"),
        (0, None, "^0 denoising steps; use 1 to 1000"),
        (-1, None, "num_inference_steps is -1, allowed are 1 to 1000"),
        (1001, None, "num_inference_steps is 1001, allowed are 1 to 1000"),
        (8.0, None, r"num_inference_steps is 8\.0 \(float\)"),
        (True, None, r"num_inference_steps is True \(bool\)"),
        (20, 1.5, "strength is 1.5, allowed are 0 to 1"),
        (20, float("nan"), "strength is nan"),
    ],
)
def test_steps_that_cannot_run_are_refused(steps: Any, strength: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        rules.check_steps(steps, strength)


def test_guidance_is_finite_and_in_range() -> None:
    assert [rules.check_guidance(value) for value in (0, 1.0, 7.5, 100)] == [0.0, 1.0, 7.5, 100.0]
    for value in (-0.1, 100.5, float("nan"), float("inf"), True, "7", None):
        with pytest.raises(RequestError, match="guidance_scale is"):
            rules.check_guidance(value)


def test_token_limits_are_in_range() -> None:
    assert rules.check_token_limit(512, 512) == 512
    for value in (0, 513, 77.0, None):
        with pytest.raises(RequestError, match="max_sequence_length is"):
            rules.check_token_limit(value, 512)


# ---- seeds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [0, -1, 1582218195625938945, 4873214862074861312, 9223372036854775807, MAX_SEED]
)
def test_seeds_are_exact_as_numbers_and_as_text(seed: int) -> None:
    assert rules.check_seed(seed) == rules.check_seed(str(seed)) == seed


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (42.0, r"seed is 42\.0 \(float\), which cannot hold every seed exactly"),
        (float("nan"), r"seed is nan \(float\)"),
        (True, r"seed is True \(bool\)"),
        (None, r"seed is None \(null\)"),
        (-2, "seed is -2, allowed are 0 to 18446744073709551615, or -1"),
        (MAX_SEED + 1, "seed is 18446744073709551616, allowed are"),
        ("18446744073709551616", "seed is 18446744073709551616, allowed are"),
        ("9" * 5000, "seed is the text '999"),
        ("", "seed is the text ''"),
        ("1.0", r"seed is the text '1\.0', expected decimal digits"),
        ("1e3", "seed is the text '1e3'"),
        ("0x10", "seed is the text '0x10'"),
        ("1_000", "seed is the text '1_000'"),
        ("٣", "seed is the text"),
        (" 7", "seed is the text ' 7'"),
        ("7\n", "seed is the text"),
        (b"7", r"\(bytes\)"),
    ],
)
def test_what_is_no_exact_seed_is_refused(seed: object, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        rules.check_seed(seed)


def test_each_image_has_a_seed_of_its_own() -> None:
    assert rules.expand_seeds(100, 4) == [100, 101, 102, 103]
    assert rules.expand_seeds(MAX_SEED - 1, 2) == [MAX_SEED - 1, MAX_SEED]
    with pytest.raises(RequestError, match=f"start at {MAX_SEED - 1} or below"):
        rules.expand_seeds(MAX_SEED, 2)
    for count in (0, -1, 2.0, None):
        with pytest.raises(RequestError, match="num_images is"):
            rules.expand_seeds(1, count)


def test_drawn_seeds_differ_and_survive_a_64_bit_float() -> None:
    drawn = {rules.draw_seed() for _ in range(100)}

    assert len(drawn) == 100
    assert all(int(float(seed)) == seed for seed in drawn)
    first, second = rules.expand_seeds(-1, 2)
    assert second == first + 1
    assert rules.expand_seeds(-1, 1) != [first]


# ---- prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "   ", "nan", "None", "null", "a cat\n(red:1.4) dog", "a\r\nb\u2028c", "(x:0.5), ((y))",
     "caf\u00e9", "cafe\u0301", "\u200f\u061cabc", "\U0001f469\u200d\U0001f680", "\ufeffx",
     "x" * 100_000, "\x1b[31mred"],
)  # fmt: skip
def test_prompts_pass_unchanged(text: str) -> None:
    assert rules.check_prompt(text, "prompt") is text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "^negative_prompt is null"),
        (5, r"^negative_prompt is 5 \(int\), expected text"),
        (float("nan"), r"^negative_prompt is nan \(float\), expected text"),
        ("cat\0dog", "^negative_prompt has a NUL at position 3"),
        ("ab\ud800", r"^negative_prompt has a lone surrogate U\+D800 at position 2"),
        ("x" * 100_001, "^negative_prompt has 100001 characters, 100000 are allowed"),
    ],
)
def test_what_is_no_prompt_is_refused(text: object, expected: str) -> None:
    with pytest.raises(RequestError, match=expected) as caught:
        rules.check_prompt(text, "negative_prompt")
    assert len(str(caught.value)) < 200


def test_the_prompts_of_a_run_fit_into_what_a_server_takes() -> None:
    for prompts in (["x" * 99_000] * 4, [""], ["\u00e9" * 60_000]):
        assert rules.check_prompts(prompts, "blurry") == prompts
    for prompts, negative, nbytes in [
        (["x" * 99_000] * 4, "y" * 5000, 401_020),
        (["\U0001f7e5" * 60_000], "", 720_008),  # twelve bytes each, escaped as JSON
    ]:
        with pytest.raises(RequestError, match=f"of this run take {nbytes} bytes as JSON, 400000"):
            rules.check_prompts(prompts, negative)
    with pytest.raises(RequestError, match="prompt is an empty list"):
        rules.check_prompts([])


def test_escaped_text_shows_what_would_steer_a_terminal() -> None:
    text = "a\x1b[31m\nb\u202e\u200f\u061c\ufeff\u2028\x9b\ud800 é \U0001f469\u200d\U0001f680 \\"

    assert rules.escape_for_terminal(text) == (
        r"a\x1b[31m\nb\u202e\u200f\u061c\ufeff\u2028\x9b\ud800 é "
        "\U0001f469\u200d\U0001f680 \\"
    )
    assert rules.escape_for_terminal("x" * 1000, limit=3) == "xxx… (+997 characters)"


@given(st.text())
def test_escaped_text_is_printable_on_one_line(text: str) -> None:
    shown = rules.escape_for_terminal(text)

    shown.encode("utf-8")
    assert len(shown.splitlines()) <= 1
    assert not set(shown) & set(map(chr, [*range(32), *range(127, 160), *range(0x202A, 0x202F)]))


# ---- dtypes and devices --------------------------------------------------------------------


def test_dtypes_are_spelt_exactly() -> None:
    assert [rules.check_dtype(name) for name in rules.DTYPES] == [*rules.DTYPES]
    for name, hint in [
        ("fp16", "did you mean float16?"), ("fp 16", "did you mean float16?"),
        ("BF16", "did you mean bfloat16?"), ("torch.float32", "did you mean float32?"),
        ("float8", "allowed are float32, bfloat16, float16 and auto"), ("", "allowed are"),
        (None, "allowed are"), (16, "allowed are"),
    ]:  # fmt: skip
        with pytest.raises(RequestError) as caught:
            rules.check_dtype(name)
        assert str(caught.value).endswith(hint) or hint in str(caught.value)


def test_an_automatic_dtype_is_that_of_the_files() -> None:
    assert rules.check_dtype("auto", "bfloat16") == "bfloat16"
    assert rules.check_dtype("auto", "float8_e4m3fn") == "bfloat16"
    assert rules.check_dtype("auto") == "float32"
    assert rules.check_dtype("float32", "bfloat16") == "float32"


def test_a_dtype_of_less_range_than_the_files_is_told() -> None:
    told = rules.narrowing_warning("float16", "bfloat16")
    assert told is not None and "are bfloat16" in told and "65504" in told
    for dtype, files in [("float16", "float16"), ("float16", None), ("bfloat16", "float32"),
                         ("float32", "bfloat16")]:  # fmt: skip
        assert rules.narrowing_warning(dtype, files) is None


def test_devices_are_named_exactly() -> None:
    for name in ("cpu", "cuda", "cuda:0", "cuda:15"):
        assert rules.check_device_name(name) == name
    for wrong in ("gpu", "CUDA", "cuda:", "cuda:01", "cuda:-1", "cpu:0", "mps", "", None, 0,
                  "cuda:0\n"):  # fmt: skip
        with pytest.raises(RequestError, match="allowed are cpu, cuda and cuda:N"):
            rules.check_device_name(wrong)


def test_the_rules_load_no_torch() -> None:
    code = "import sys, stages.rules; print({'torch', 'numpy', 'diffusers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout.strip() == "set()"

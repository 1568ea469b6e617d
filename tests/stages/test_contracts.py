"""A request's digest: equal for equal requests, in every process, and for nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from stages.contracts import MAX_SEED, StageRequest, StageResult, canonical_json
from tests.support.chain import request


def test_the_order_of_options_does_not_matter() -> None:
    one = request("denoise", {"height": 64, "width": 32})
    other = request("denoise", {"width": 32, "height": 64})
    assert one.digest == other.digest


def test_a_label_is_not_part_of_the_digest() -> None:
    assert request("encode", {}, label="a").digest == request("encode", {}, label="b").digest


@pytest.mark.parametrize(
    "changes",
    [
        {"code_version": "2"},
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"components": {"vae": "0" * 64}},
        {"configs": {"vae": "0" * 64}},
        {"libraries": {"diffusers": "0"}},
        {"task": "image-to-image"},
    ],
)
def test_everything_else_is(changes: dict[str, Any]) -> None:
    assert request("decode", {}).digest != request("decode", {}, **changes).digest


def test_seeds_next_to_each_other_beyond_53_bits_differ() -> None:
    digests = {request("denoise", {}, seed=MAX_SEED - n).digest for n in range(3)}
    assert len(digests) == 3


def test_negative_zero_asks_for_the_same_as_zero() -> None:
    assert canonical_json({"x": -0.0}) == canonical_json({"x": 0.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_cannot_be_asked_for(bad: float) -> None:
    with pytest.raises(ValidationError, match="use a finite number"):
        request("denoise", {"guidance_scale": bad})


def test_a_value_that_is_not_plain_json_is_refused() -> None:
    with pytest.raises(TypeError, match="set cannot be part of a request"):
        canonical_json({"x": {1, 2}})  # type: ignore[dict-item]


def test_unknown_fields_and_seeds_out_of_range_are_refused() -> None:
    with pytest.raises(ValidationError):
        request("denoise", {}, seed=MAX_SEED + 1)
    with pytest.raises(ValidationError):
        StageRequest.model_validate(request("denoise", {}).model_dump() | {"priority": 1})


def test_composed_and_decomposed_letters_are_different_prompts() -> None:
    assert (
        request("encode", {"prompt": "\u00e9"}).digest
        != request("encode", {"prompt": "e\u0301"}).digest
    )


def test_the_digest_is_equal_in_fresh_processes_whatever_their_hash_seed() -> None:
    code = (
        "from tests.support.chain import request;"
        "print(request('denoise', {'b': [1.5, None], 'a': {'z': 'é', 'y': True}}, seed=9).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": locale},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed, locale in [("0", "C"), ("1", "C.UTF-8"), ("random", "C")]
    }
    assert len(found) == 1


def test_a_result_stays_under_a_kilobyte() -> None:
    refs = {f"image-{n}": {"digest": "f" * 64, "size": 2**40} for n in range(4)}
    result = StageResult.model_validate({"stage": "decode", "artifacts": refs})
    assert len(result.model_dump_json()) < 1024

"""Decoding in tiles: another computation, with a key of its own and a note beside the pictures."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stages import execute
from stages.artifacts import ArtifactStore
from stages.contracts import StageContext, StageResult
from stages.errors import RequestError
from stages.worker import failure
from tests.support import tiny_models
from tests.support.chain import context, request, run_stage

TEXT = {"prompt": "a small red fox", "max_sequence_length": 64}
LOOP = {"height": 160, "width": 128, "num_inference_steps": 2}  # the VAE's tiles have 64 pixels


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> StageContext:
    root = tmp_path_factory.mktemp("tiny")
    return context(tiny_models.z_image(root / "z-image"), root)


@pytest.fixture(scope="module")
def latents(where: StageContext) -> StageResult:
    embeds = run_stage(request("encode", TEXT), where)[0]
    return run_stage(request("denoise", LOOP, embeds, seed=1), where)[0]


def pixels(where: StageContext, result: StageResult) -> np.ndarray[Any, Any]:
    png = ArtifactStore(where.store_url).read(result.artifacts["image-0"])
    return np.asarray(Image.open(io.BytesIO(png)))


def test_tiles_are_a_request_of_their_own_that_leaves_no_trace(
    where: StageContext, latents: StageResult
) -> None:
    plain, tiled = request("decode", {}, latents), request("decode", {"tiling": True}, latents)
    assert plain.digest != tiled.digest
    first = run_stage(plain, where)[0]
    made, report, _ = run_stage(tiled, where)
    assert run_stage(plain, where)[0] == first, "tiling outlived its request"
    store = ArtifactStore(where.store_url)
    assert store.lookup(plain) == first
    assert store.lookup(tiled) == made
    assert set(first.artifacts) == {"image-0"}
    note = json.loads(store.read(made.artifacts["tiling"]))
    assert note["vae"] == "AutoencoderKL" and note["tile_sample_min_size"] == 64
    assert pixels(where, made).shape == pixels(where, first).shape == (160, 128, 3)
    assert not np.array_equal(pixels(where, made), pixels(where, first))
    assert report["fallbacks"] == []


def test_the_report_tells_what_was_tried_before(where: StageContext, latents: StageResult) -> None:
    after = where.model_copy(update={"fallbacks": ("decode ran out of memory",)})
    _, report, _ = run_stage(request("decode", {"tiling": True}, latents), after)
    assert report["fallbacks"] == ["decode ran out of memory"]


def test_a_vae_without_tiles_says_so(
    where: StageContext, latents: StageResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(request("decode", {}, latents), where)
    vae = execute._KEPT[0].pipe.vae
    with monkeypatch.context() as patch:
        patch.delattr(vae, "use_tiling")  # what the library asks before it tiles
        with pytest.raises(RequestError, match="AutoencoderKL cannot decode in tiles"):
            run_stage(request("decode", {"tiling": True}, latents), where)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_cuda_library_without_memory_is_out_of_memory_as_well(text: str) -> None:
    assert failure(RuntimeError(text), "decode").error == "StageOutOfMemory"
    assert failure(RuntimeError("CUDA error: misaligned address"), "decode").error == "StageFailed"

"""Decoding in tiles: another computation, with a key of its own and a note beside the pictures."""

from __future__ import annotations

import gc
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stages import execute
from stages.artifacts import ArtifactStore
from stages.contracts import OffloadChoice, StageContext, StageResult
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_tiles_fit_where_a_whole_decode_does_not(tmp_path: Path) -> None:
    from stages.models import MINIATURE

    on_gpu = context(MINIATURE, tmp_path, device="cuda")
    prompt = {"prompt": "a large red circle on a white background", "max_sequence_length": 64}
    embeds = run_stage(request("encode", prompt), on_gpu)[0]
    loop = {"height": 1024, "width": 1024, "num_inference_steps": 1}
    latents = run_stage(request("denoise", loop, embeds, seed=1), on_gpu)[0]
    tight = on_gpu.model_copy(update={"offload": OffloadChoice(device_budget=256 << 20)})
    whole = request("decode", {}, latents)
    try:
        _, report, _ = run_stage(whole, tight)
    except torch.OutOfMemoryError as error:
        assert failure(error, "decode").error == "StageOutOfMemory"
    else:
        backend = report["offload"]["components"]["vae"]["backend"]
        assert backend == "torch", "the native allocator went over its limit"
        pytest.skip("plain torch keeps no limit")
    gc.collect()
    made, _, _ = run_stage(request("decode", {"tiling": True}, latents), tight)
    assert pixels(on_gpu, made).shape == (1024, 1024, 3)


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

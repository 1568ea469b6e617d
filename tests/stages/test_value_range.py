"""A weight that float16 cannot hold is an error, not a black picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.components import bind
from stages.errors import ModelError
from stages.families import family_named
from stages.phases import split
from tests.support import tiny_models

FAMILY = family_named("z-image")


def with_large_weights(directory: Path, dtype: torch.dtype) -> Path:
    """A model whose VAE has two weights of 70000 and one of minus 70000."""
    model_dir = tiny_models.z_image(directory, dtype=dtype)
    weights = model_dir / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["decoder.conv_in.bias"][:2] = 70000
    tensors["decoder.conv_out.bias"][0] = -70000
    save_file(tensors, weights)
    return model_dir


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_that_float16_cannot_hold_are_counted_and_refused(
    tmp_path: Path, stored: torch.dtype
) -> None:
    model_dir = with_large_weights(tmp_path / "model", stored)
    graph = split(FAMILY, "text-to-image")

    with pytest.raises(ModelError) as caught:
        bind(graph, "decode", model_dir, dtype=torch.float16, device="cpu")

    message = str(caught.value)
    assert f"component 'vae' of {model_dir} has 3 values in 2 tensors" in message
    assert "first 'decoder.conv_" in message
    assert message.endswith("it reaches 65504; use dtype auto, bfloat16 or float32")


def test_weights_in_range_are_loaded_whatever_the_dtype(tmp_path: Path) -> None:
    model_dir = with_large_weights(tmp_path / "model", torch.bfloat16)
    graph = split(FAMILY, "text-to-image")

    wide = bind(graph, "decode", model_dir, dtype=torch.float32, device="cpu")
    other = bind(graph, "denoise", model_dir, dtype=torch.float16, device="cpu")

    assert int((wide.vae.decoder.conv_in.bias > 65504).sum()) == 2
    assert {p.dtype for p in other.transformer.parameters()} == {torch.float16}

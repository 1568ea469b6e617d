"""Weight files that older versions of the libraries wrote are read as the loader reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.errors import ModelError
from stages.inspect import check_weights
from stages.models import open_model
from tests.support import tiny_models

Tensors = dict[str, torch.Tensor]


def rewrite(model_dir: Path, component: str, change: Callable[[Tensors], Tensors]) -> None:
    (weights,) = (model_dir / component).glob("*.safetensors")
    tensors = load_file(weights)
    save_file(change(tensors), weights, metadata={"format": "pt"})


def test_a_text_encoders_old_names_are_those_of_todays_module(tmp_path: Path) -> None:
    """`visual.` and `model.layers.` became `model.visual.` and `model.language_model.layers.`"""
    model_dir = tiny_models.qwen_image(tmp_path / "old")
    (weights,) = (model_dir / "text_encoder").glob("*.safetensors")
    assert any(name.startswith("model.layers.") for name in load_file(weights))
    assert check_weights(open_model(model_dir), {"text_encoder"})["text_encoder"] > 1000


def test_a_renamed_tensor_that_is_missing_is_named_as_the_module_names_it(tmp_path: Path) -> None:
    model_dir = tiny_models.qwen_image(tmp_path / "lacking")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(model_dir, "text_encoder", lambda old: {k: v for k, v in old.items() if k != name})
    with pytest.raises(ModelError, match=r"'model\.language_model\.layers\.0\.mlp\.down_proj"):
        check_weights(open_model(model_dir), {"text_encoder"})


def test_buffers_that_older_versions_wrote_are_no_error(tmp_path: Path) -> None:
    model_dir = tiny_models.sdxl(tmp_path / "old")
    ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    rewrite(model_dir, "text_encoder", lambda old: old | ids)
    check_weights(open_model(model_dir), {"text_encoder"})
    rewrite(model_dir, "text_encoder", lambda old: old | {"text_model.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"holds 1 tensors .*extra"):
        check_weights(open_model(model_dir), {"text_encoder"})


def test_a_shared_embedding_may_come_under_either_of_its_names(tmp_path: Path) -> None:
    model_dir = tiny_models.flux(tmp_path / "both")
    rewrite(
        model_dir,
        "text_encoder_2",
        lambda old: old | {"encoder.embed_tokens.weight": old["shared.weight"].clone()},
    )
    check_weights(open_model(model_dir), {"text_encoder_2"})

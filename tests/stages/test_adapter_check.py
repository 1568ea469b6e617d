"""A LoRA file that does not fit a model is named before any weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")

from stages.adapter_check import check_adapter
from stages.contracts import AdapterUse
from stages.errors import RequestError
from stages.manifest import AdapterFacts
from stages.models import open_model
from tests.support.lora_files import factors, write_lora
from tests.support.tiny_families import CASES, Case
from tests.support.video_cases import VIDEO_CASES

USE = AdapterUse(digest="0" * 64)


def checked(case: Any, model_dir: Path, path: Path, target: str = "") -> AdapterFacts:
    worn = USE.model_copy(update={"target": target})
    return check_adapter(case.family, open_model(model_dir).components, worn, path)


@pytest.fixture
def flux() -> Case:
    return CASES["flux"]


def test_the_components_that_it_changes_are_told(flux: Case, tiny: Any, tmp_path: Path) -> None:
    model_dir = tiny(flux)
    for names in (["transformer"], ["text_encoder"], ["text_encoder", "transformer"]):
        tensors = {k: v for name in names for k, v in factors(model_dir, name).items()}
        path = write_lora(tmp_path / f"{len(names)}.safetensors", tensors)
        assert checked(flux, model_dir, path).components == tuple(names)


def test_a_file_of_another_family_is_told_by_its_names(tiny: Any, tmp_path: Path) -> None:
    sdxl, flux, z_image = (CASES[name] for name in ("sdxl", "flux", "z-image"))
    unet = write_lora(tmp_path / "unet.safetensors", factors(tiny(sdxl), "unet"))
    with pytest.raises(RequestError, match=r"no part of flux .*transformer, text_encoder.*'unet\."):
        checked(flux, tiny(flux), unet)
    other = write_lora(tmp_path / "z.safetensors", factors(tiny(z_image), "transformer"))
    with pytest.raises(RequestError, match=r"z.safetensors, tensor .*FluxTransformer2D.*no lay"):
        checked(flux, tiny(flux), other)


def test_a_file_for_another_size_is_told_by_its_shapes(
    flux: Case, tiny: Any, tmp_path: Path
) -> None:
    tensors = factors(tiny(flux), "transformer")
    name = next(name for name in tensors if name.endswith("to_q.lora_A.weight"))
    tensors[name] = torch.zeros(2, 48)
    path = write_lora(tmp_path / "wide.safetensors", tensors)
    with pytest.raises(RequestError, match=r"to_q.lora_A.weight' has shape \(2, 48\), .*\(2, 32\)"):
        checked(flux, tiny(flux), path)
    tensors[name.replace("_A", "_B")] = torch.zeros(48, 2)
    tensors[name] = torch.zeros(2, 32)
    write_lora(path, tensors)
    with pytest.raises(RequestError, match=r"to_q.lora_B.weight' has shape \(48, 2\), .*\(32, 2\)"):
        checked(flux, tiny(flux), path)


def test_a_layer_that_takes_none_is_named(flux: Case, tiny: Any, tmp_path: Path) -> None:
    norm = "transformer.transformer_blocks.0.attn.norm_q.lora_"
    tensors = {f"{norm}A.weight": torch.zeros(2, 16), f"{norm}B.weight": torch.zeros(16, 2)}
    path = write_lora(tmp_path / "norm.safetensors", tensors)
    with pytest.raises(RequestError, match=r"norm_q' of transformer is a \w*Norm, which takes no"):
        checked(flux, tiny(flux), path)


def test_a_component_is_named_that_takes_one(flux: Case, tiny: Any, tmp_path: Path) -> None:
    path = write_lora(tmp_path / "a.safetensors", factors(tiny(flux), "transformer"))
    assert checked(flux, tiny(flux), path, "transformer").components == ("transformer",)
    with pytest.raises(RequestError, match=r"'vae', but .* flux .* are transformer, text_encoder"):
        checked(flux, tiny(flux), path, "vae")
    wan = VIDEO_CASES["wan"]
    with pytest.raises(RequestError, match=r"'transformer_2', but .* wan .* are transformer$"):
        checked(wan, tiny(wan), path, "transformer_2")


def test_a_part_that_the_loader_would_leave_out_is_told(
    flux: Case, tiny: Any, tmp_path: Path
) -> None:
    """kohya's factors under diffusers' prefix: the loader reads the transformer's alone."""
    names = "text_encoder.encoder.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{names}down.weight": torch.zeros(2, 32), f"{names}up.weight": torch.zeros(32, 2)}
    tensors |= factors(tiny(flux), "transformer")
    path = write_lora(tmp_path / "odd.safetensors", tensors)
    with pytest.raises(RequestError, match=r"has tensors for text_encoder, such as .*leave out"):
        checked(flux, tiny(flux), path)


def test_layers_of_a_text_encoder_that_the_loader_cannot_name_are_told(
    tiny: Any, tmp_path: Path
) -> None:
    sdxl = CASES["sdxl"]
    layer = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    tensors = {f"{layer}.lora_down.weight": torch.zeros(2, 32)}
    tensors |= {f"{layer}.lora_up.weight": torch.zeros(32, 2), f"{layer}.alpha": torch.tensor(1.0)}
    path = write_lora(tmp_path / "part.safetensors", tensors)
    with pytest.raises(RequestError, match=r"names layers of text_encoder in a way that diffusers"):
        checked(sdxl, tiny(sdxl), path)

"""The phase engine against the unsplit pipeline, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.components import bind, renew_job_state
from stages.errors import ModelError, RequestError
from stages.families import Family, family_named
from stages.phases import Handover, run_phase, split
from tests.support import tiny_models
from tests.support.whole_run import run_whole

FAMILY = family_named("z-image")
SIZE = {"height": 64, "width": 64}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.z_image(tmp_path_factory.mktemp("tiny") / "z-image")


def run_staged(
    family: Family,
    model_dir: Path,
    options: dict[str, dict[str, Any]],
    *,
    seed: int,
    dtype: torch.dtype,
    guidance: dict[str, float],
) -> Any:
    graph = split(family, "text-to-image")
    handed = Handover()
    for phase in graph.phases:
        pipe = bind(graph, phase, model_dir, dtype=dtype, device="cpu")
        renew_job_state(pipe, guidance)
        drawn = seed if phase == "denoise" else None
        handed = run_phase(graph, phase, pipe, options[phase], handed, seed=drawn)
    return handed.values[family.output]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_phases_in_sequence_equal_the_unsplit_pipeline(
    model_dir: Path, dtype: torch.dtype, scale: float
) -> None:
    text = {"prompt": "a small red fox", "negative_prompt": "blurry", "max_sequence_length": 64}
    options = {
        "encode": text,
        "denoise": {**SIZE, "num_inference_steps": 3},
        "decode": {"output_type": "pt"},
    }
    every = {name: value for phase in options.values() for name, value in phase.items()}
    guidance = {"guider": scale}
    whole = run_whole(FAMILY, model_dir, every, seed=7, dtype=dtype, guidance=guidance)
    staged = run_staged(FAMILY, model_dir, options, seed=7, dtype=dtype, guidance=guidance)
    assert torch.equal(whole, staged)
    assert staged.shape == (1, 3, 64, 64)


def test_phases_load_only_their_own_components(model_dir: Path) -> None:
    graph = split(FAMILY, "text-to-image")
    loaded = {
        phase: {
            name
            for name, component in bind(
                graph, phase, model_dir, dtype=torch.float32, device="cpu"
            ).components.items()
            if isinstance(component, torch.nn.Module)
        }
        for phase in graph.phases
    }
    assert loaded == {"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}}


def test_an_option_that_no_block_takes_is_an_error(model_dir: Path) -> None:
    graph = split(FAMILY, "text-to-image")
    pipe = bind(graph, "decode", model_dir, dtype=torch.float32, device="cpu")
    with pytest.raises(RequestError, match="takes no option 'guidance_scale'"):
        run_phase(graph, "decode", pipe, {"guidance_scale": 4.0}, Handover())


def test_a_component_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    """The library logs the reason and goes on without the component."""
    model_dir = tiny_models.z_image(tmp_path / "broken")
    graph = split(FAMILY, "text-to-image")
    config = model_dir / "vae" / "config.json"
    config.write_text(config.read_text().replace('"UpDecoderBlock2D"', '"NoSuchBlock"'))
    with pytest.raises(ModelError, match=r"component 'vae' of .* did not load: .*NoSuchBlock"):
        bind(graph, "decode", model_dir, dtype=torch.float32, device="cpu")


def test_a_weight_file_without_a_parameter_is_an_error(tmp_path: Path) -> None:
    """The library leaves such a parameter on the meta device and says nothing."""
    from safetensors.torch import load_file, save_file

    model_dir = tiny_models.z_image(tmp_path / "lacking")
    weights = model_dir / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    del tensors["decoder.conv_in.weight"]
    save_file(tensors, weights)
    graph = split(FAMILY, "text-to-image")
    with pytest.raises(ModelError, match=r"no weight file holds, first 'decoder.conv_in.weight'"):
        bind(graph, "decode", model_dir, dtype=torch.float32, device="cpu")


def test_weights_that_come_only_as_a_variant_are_loaded(tmp_path: Path) -> None:
    model_dir = tiny_models.z_image(tmp_path / "variant")
    for weights in model_dir.glob("*/*.safetensors"):
        weights.rename(weights.with_name(f"{weights.stem}.fp16.safetensors"))
    graph = split(FAMILY, "text-to-image")
    pipe = bind(graph, "decode", model_dir, dtype=torch.float32, device="cpu")
    assert not any(tensor.is_meta for tensor in pipe.vae.parameters())


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(RequestError, match="no task 'text-to-smell'"):
        split(FAMILY, "text-to-smell")

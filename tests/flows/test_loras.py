"""LoRA files and components from elsewhere: in the requests that they change and in no others."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("peft", reason="peft is not installed")

from flows import sdxl as module
from flows import wan
from stages.errors import ModelError, RequestError
from tests.support.lora_files import factors, whole_pipe, write_lora
from tests.support.tiny_families import CASES, PROMPT
from tests.support.video_cases import VIDEO_CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # of the whole pipeline
]

CASE = CASES["sdxl"]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Any]:
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    made.expect("sdxl")
    made.start_fork_server()
    yield made
    made.close()
    shared_launcher.cache_clear()


@pytest.fixture(scope="module")
def files(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file for the denoiser alone, and one for a text encoder, too."""
    folder, model_dir = tmp_path_factory.mktemp("loras"), tiny(CASE)
    unet = factors(model_dir, "unet")
    both = factors(model_dir, "unet", seed=2) | factors(model_dir, "text_encoder_2", seed=2)
    return {
        "unet": write_lora(folder / "fox fur.safetensors", unet),
        "both": write_lora(folder / "both.safetensors", both),
    }


def given(model_dir: Path, output: Path, **changes: Any) -> dict[str, Any]:
    found = {"prompt": PROMPT, "model": str(model_dir), "seed": 7, "height": 64, "width": 64}
    found |= {"negative_prompt": "blurry", "guidance_scale": 5.0, "num_inference_steps": 3}
    return found | {"device": "cpu", "output": str(output)} | changes


def whole(model_dir: Path, worn: dict[Path, float]) -> np.ndarray[Any, Any]:
    import torch

    pipe = whole_pipe(CASE.family, model_dir, torch.float32, CASE.guidance)
    for n, path in enumerate(worn):
        pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=f"a{n}")
    pipe.set_adapters([f"a{n}" for n in range(len(worn))], list(worn.values()))
    every = {name: value for phase in CASE.options.values() for name, value in phase.items()}
    generator = torch.Generator("cpu").manual_seed(7)
    return np.asarray(pipe(**every, output_type="pil", generator=generator, output="images")[0])


@pytest.mark.usefixtures("prefect_server")
def test_a_file_is_part_of_the_requests_that_it_changes(
    tiny: Any, home: Path, tmp_path: Path, launcher: Any, files: dict[str, Path]
) -> None:
    model_dir = tiny(CASE)

    def paint(*lora: str) -> tuple[np.ndarray[Any, Any], dict[str, int], Any]:
        before = Counter(launcher.num_processes_started)
        (made,) = module.sdxl(**given(model_dir, tmp_path, lora=list(lora)))
        with Image.open(made.path) as picture:
            started = dict(Counter(launcher.num_processes_started) - before)
            return np.asarray(picture), started, json.loads(picture.text["exeunt"])

    plain, started, _ = paint()
    assert started == {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}
    furry, started, settings = paint(f"{files['unet']}:0.8")
    assert started == {"inspect": 1, "denoise": 1, "decode": 1}, "the prompt's embedding is found"
    assert settings["adapters"] == {"fox fur": 0.8}
    assert np.array_equal(furry, whole(model_dir, {files["unet"]: 0.8}))
    assert not np.array_equal(furry, plain)

    _, started, _ = paint(f"{files['unet']}:0.4")
    assert started == {"denoise": 1, "decode": 1}, "what it changes is known of any scale"
    two, started, settings = paint(f"{files['unet']}:0.8", f"{files['both']}:-0.5")
    assert started == {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}
    assert settings["adapters"] == {"fox fur": 0.8, "both": -0.5}
    assert np.array_equal(two, whole(model_dir, {files["unet"]: 0.8, files["both"]: -0.5}))

    again, started, _ = paint(f"{files['unet']}:0.8")
    assert started == {} and np.array_equal(again, furry)


@pytest.mark.usefixtures("prefect_server")
def test_a_file_of_another_family_fails_before_any_model_loads(
    tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    other = CASES["z-image"]
    path = write_lora(tmp_path / "z.safetensors", factors(tiny(other), other.family.denoiser))
    before = Counter(launcher.num_processes_started)
    with pytest.raises(RequestError, match=r"z.safetensors .* no part of sdxl .*\(unet, text_"):
        module.sdxl(**given(tiny(CASE), tmp_path, lora=str(path)))
    assert dict(Counter(launcher.num_processes_started) - before) == {"inspect": 1}


def test_bad_files_are_named_before_any_process_starts(
    tiny: Any, home: Path, tmp_path: Path, files: dict[str, Path]
) -> None:
    pickle = tmp_path / "lora.pt"
    pickle.write_bytes(b"\x80\x04.")
    for lora, message in (
        (str(pickle), "is a pickle"),
        (f"{files['unet']}:nan", "scale is nan"),
        (str(tmp_path / "none.safetensors"), "lora is missing"),
        (f"transformer={files['unet']}", r"names component 'transformer', but .* has .*unet"),
        (str(tiny(CASE) / "unet"), "holds no LoRA"),
    ):
        with pytest.raises(RequestError, match=message):
            module.check(**given(tiny(CASE), tmp_path, lora=[str(files["both"]), lora]))


def test_of_two_transformers_the_one_that_wears_a_file_is_told(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    case = VIDEO_CASES["wan22"]
    path = write_lora(tmp_path / "x.safetensors", factors(tiny(case), "transformer"))
    job = {"prompt": PROMPT, "model": str(tiny(case)), "device": "cpu", "output": str(tmp_path)}
    job |= {"height": 64, "width": 64, "num_frames": 5}
    told = wan.check(**job, lora=str(path)).warnings
    assert any("x.safetensors is worn by transformer alone" in text for text in told)
    told = wan.check(**job, lora=[f"transformer_2={path}"]).warnings
    assert not any("is worn by" in text for text in told)


@pytest.mark.usefixtures("prefect_server")
def test_a_component_from_elsewhere_is_part_of_the_requests_that_load_it(
    tiny: Any, home: Path, tmp_path: Path, launcher: Any
) -> None:
    """A VAE with other weights, in a file of its own: nothing is denoised anew."""
    model_dir = tiny(CASE)
    other = CASE.build(tmp_path / "other", seed=3)
    path = tmp_path / "a vae.safetensors"
    shutil.copy(other / "vae" / "diffusion_pytorch_model.safetensors", path)
    mixed = Path(shutil.copytree(model_dir, tmp_path / "mixed"))
    shutil.copy(path, mixed / "vae" / "diffusion_pytorch_model.safetensors")

    def paint(model: Path, **changes: Any) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
        before = Counter(launcher.num_processes_started)
        (made,) = module.sdxl(**given(model, tmp_path, **changes))
        with Image.open(made.path) as picture:
            return np.asarray(picture), dict(Counter(launcher.num_processes_started) - before)

    plain, _ = paint(model_dir)
    found, started = paint(model_dir, component=f"vae={path}")
    assert started == {"inspect": 1, "decode": 1}
    expected, _ = paint(mixed)
    assert np.array_equal(found, expected) and not np.array_equal(found, plain)


def test_a_bad_source_is_named_before_any_process_starts(
    tiny: Any, home: Path, tmp_path: Path
) -> None:
    model_dir = tiny(CASE)
    flux = tiny(CASES["flux"])
    for component, message in (
        ("vae", "expected NAME=SOURCE"),
        ("transformer=x", r"names 'transformer', but .* has .*unet"),
        (f"unet={flux / 'transformer'}", "is a FluxTransformer2DModel, but the model's unet"),
        (f"vae={tmp_path / 'none.safetensors'}", "is missing"),
        ("vae=org/name", "hf download org/name"),
    ):
        with pytest.raises((ModelError, RequestError), match=message):
            module.check(**given(model_dir, tmp_path, component=component))
    folder = Path(shutil.copytree(model_dir / "unet", tmp_path / "unet"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("stages.component_sources.require_quantizer", lambda *_: None)
        patched.setattr("stages.model_component.require_quantizer", lambda *_: None)
        with pytest.raises(RequestError, match="loads on a GPU only, but device is cpu"):
            module.check(**given(model_dir, tmp_path, component=f"unet={folder}"))

"""Quantized transformers of every library that is there: the bits of the whole pipeline."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import offload, quantized
from stages.artifacts import ArtifactStore
from stages.contracts import OffloadChoice, StageContext
from stages.errors import DependencyError, ModelError
from stages.handover import unpack
from stages.models import open_model
from stages.quantized import absent_and_strange
from tests.support.chain import context, request, run_stage
from tests.support.fake_gpu import FakeDevices
from tests.support.kept_pipes import drop_kept
from tests.support.lora_files import whole_pipe
from tests.support.tiny_families import CASES

CASE = CASES["flux"]
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    drop_kept()
    yield
    drop_kept()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(CASE.build(tmp_path_factory.mktemp("tiny") / "flux", dtype=DTYPE))


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, when they are imported
        return pytest.importorskip(name, reason=f"{name} is not installed")


def torchao(model_dir: Path, folder: Path) -> Path:
    quantization = library("torchao.quantization")
    from diffusers import TorchAoConfig

    return saved(model_dir, folder, TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def bitsandbytes(model_dir: Path, folder: Path) -> Path:
    library("bitsandbytes")
    if not torch.cuda.is_available():
        pytest.skip("diffusers loads weights of bitsandbytes on a GPU only")
    from diffusers import BitsAndBytesConfig

    return saved(model_dir, folder, BitsAndBytesConfig(load_in_4bit=True))


def saved(model_dir: Path, folder: Path, config: Any) -> Path:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(
        model_dir / "transformer", quantization_config=config, dtype=DTYPE
    )
    model.save_pretrained(folder)
    return folder


def gguf(model_dir: Path, folder: Path) -> Path:
    gguf = library("gguf")
    folder.mkdir()
    path = folder / "flux-Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    for name, tensor in load_file(next((model_dir / "transformer").glob("*.safetensors"))).items():
        numbers = tensor.float().numpy()
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "bitsandbytes": bitsandbytes,
    "gguf": gguf,
    "torchao": torchao,
}


@pytest.fixture(params=sorted(KINDS))
def source(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Path:
    """A quantized transformer: a folder, or a GGUF file."""
    return KINDS[request.param](model_dir, tmp_path / request.param)


def sourced(model_dir: Path, root: Path, source: Path) -> StageContext:
    return context(model_dir, root).model_copy(update={"sources": {"transformer": str(source)}})


def latents(where: StageContext) -> Any:
    embeds = run_stage(
        request("encode", CASE.requests["encode"], family="flux", dtype="bfloat16"), where
    )[0]
    asked = request(
        "denoise", CASE.requests["denoise"], embeds, family="flux", seed=7, dtype="bfloat16"
    )
    result = run_stage(asked, where)[0]
    return unpack(ArtifactStore(where.store_url).path(result.only()), "cpu").handover.values


def whole(model_dir: Path, source: Path) -> torch.Tensor:
    """The latents of one pipeline whose transformer diffusers itself has loaded."""
    import diffusers

    kind = diffusers.FluxTransformer2DModel
    if source.suffix == ".gguf":
        config = diffusers.GGUFQuantizationConfig(compute_dtype=DTYPE)
        model = kind.from_single_file(
            str(source),
            config=str(model_dir / "transformer"),
            quantization_config=config,
            dtype=DTYPE,
        )
    else:
        model = kind.from_pretrained(source, dtype=DTYPE)
    pipe = whole_pipe(CASE.family, model_dir, DTYPE, CASE.guidance)
    pipe.update_components(transformer=model)
    every = {name: value for phase in CASE.options.values() for name, value in phase.items()}
    generator = torch.Generator("cpu").manual_seed(7)
    found: torch.Tensor = pipe(**every, generator=generator, output="latents")
    return found


def test_the_stages_make_the_bits_of_the_whole_pipeline(
    model_dir: Path, tmp_path: Path, source: Path
) -> None:
    where = sourced(model_dir, tmp_path, source)
    run_stage(request("inspect", {}, family="flux", dtype="bfloat16"), where)
    made = latents(where)["latents"]
    assert torch.equal(made, whole(model_dir, source))
    drop_kept()
    assert not torch.equal(made, latents(context(model_dir, tmp_path))["latents"])


def test_quantized_weights_stream(
    model_dir: Path, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("native", reason="the native extension is not built")
    where = sourced(model_dir, tmp_path, source)
    expected = latents(where)["latents"]
    drop_kept()
    devices = FakeDevices()
    monkeypatch.setattr(offload, "open_device", devices.open)
    monkeypatch.setattr(offload, "is_computed_in_place", lambda _: False)
    choice = OffloadChoice(preset="low_memory", link_rate=10**9)
    found = latents(where.model_copy(update={"offload": choice}))["latents"]
    assert torch.equal(found, expected)
    assert devices.drivers and devices.violations() == []


def test_what_auto_computes_in_is_told_by_what_was_not_quantized(
    model_dir: Path, source: Path
) -> None:
    part = open_model(model_dir, sources={"transformer": source}).components["transformer"]
    assert part.file_dtype == ("gguf" if source.suffix == ".gguf" else "bfloat16")
    assert part.quant_method in KINDS


def test_a_missing_library_or_an_unknown_quantizer_is_named(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(model_dir / "transformer", tmp_path / "t"))
    config = json.loads((folder / "config.json").read_text())

    def refuse(error: type[Exception], method: str, message: str) -> None:
        told = config | {"quantization_config": {"quant_method": method}}
        (folder / "config.json").write_text(json.dumps(told))
        with pytest.raises(error, match=message):
            open_model(model_dir, sources={"transformer": folder})

    refuse(ModelError, "nunchaku", "quantized by 'nunchaku', allowed are bitsandbytes, gguf, to")
    refuse(ModelError, "quanto", "leaves its weights empty when it loads it; take weights that")
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    refuse(DependencyError, "torchao", "torchao is not installed; pip install torchao")


@pytest.mark.parametrize(
    "packed",
    [
        ["a.b._weight_qdata", "a.b._weight_scale", "a.b.bias"],
        ["a.b.weight", "a.b.weight.absmax", "a.b.weight.quant_state.bitsandbytes__nf4", "a.b.bias"],
        ["a.b.weight", "a.b.SCB", "a.b.weight_format", "a.b.bias"],
    ],
)
def test_each_librarys_names_tell_their_weight(packed: list[str]) -> None:
    assert absent_and_strange(["a.b.weight", "a.b.bias"], packed) == ([], [])
    absent, strange = absent_and_strange(["a.b.weight", "c.weight"], [*packed, "d.weight"])
    assert absent == ["c.weight"] and strange == ["d.weight"]


def test_diffusers_itself_cannot_load_a_folder_that_quanto_has_quantized(
    model_dir: Path, tmp_path: Path
) -> None:
    """Why such a folder is refused; a diffusers that can should be let to."""
    library("optimum.quanto")
    from diffusers import FluxTransformer2DModel, QuantoConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # both are deprecated
        folder = saved(model_dir, tmp_path / "quanto", QuantoConfig(weights_dtype="int8"))
        found = FluxTransformer2DModel.from_pretrained(folder, dtype=DTYPE)
    assert any(weight.is_meta for weight in found.parameters())

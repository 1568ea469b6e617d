"""Components from elsewhere: the same bits wherever they lie, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.component_sources import choose_sources
from stages.contracts import StageContext, StageResult
from stages.errors import ModelError, RequestError, StageError
from stages.forecasts import forecast_model
from stages.models import open_model, resolve_model
from tests.support.chain import context, request, run_stage
from tests.support.kept_pipes import drop_kept
from tests.support.tiny_families import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CASE = CASES["flux"]
OTHER = CASES["sdxl"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def model_dir(tiny: Any) -> Path:
    return Path(tiny(CASE))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return CASE.build(tmp_path_factory.mktemp("trained") / "other", seed=5)


def latents(where: StageContext, *, dtype: str = "float32", case: Case = CASE) -> StageResult:
    drop_kept()
    embeds = run_stage(
        request("encode", case.requests["encode"], family=case.name, dtype=dtype), where
    )[0]
    asked = request(
        "denoise", case.requests["denoise"], embeds, family=case.name, seed=7, dtype=dtype
    )
    return run_stage(asked, where)[0]


def inspected(where: StageContext, case: Case = CASE) -> None:
    run_stage(request("inspect", {}, family=case.name), where)


def sourced(model_dir: Path, root: Path, **sources: Path) -> StageContext:
    told = {name: str(path) for name, path in sources.items()}
    return context(model_dir, root).model_copy(update={"sources": told})


def test_a_folder_a_model_and_a_single_file_give_the_bits_of_the_whole_model(
    model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    """The model whose transformer and text encoder were put into its own folders."""
    mixed = Path(shutil.copytree(model_dir, tmp_path / "mixed"))
    for name in ("transformer", "text_encoder_2"):
        shutil.rmtree(mixed / name)
        shutil.copytree(trained / name, mixed / name)
    expected = latents(context(mixed, tmp_path))
    assert expected != latents(context(model_dir, tmp_path))
    encoder = {"text_encoder_2": trained}
    for transformer in (
        trained / "transformer",
        trained,
        Path(shutil.copy(trained / "transformer" / WEIGHTS, tmp_path / "fine tuned.safetensors")),
    ):
        where = sourced(model_dir, tmp_path, transformer=transformer, **encoder)
        inspected(where)
        assert latents(where) == expected


def test_what_a_component_is_counts_and_not_where_it_lies(
    model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    own = open_model(model_dir)
    copy = Path(shutil.copytree(model_dir / "vae", tmp_path / "a vae"))
    same = open_model(model_dir, sources={"vae": copy})
    other = open_model(model_dir, sources={"vae": trained / "vae"})
    marks = [model.components["vae"].fingerprint(tmp_path) for model in (own, same, other)]
    assert marks[0] == marks[1] != marks[2]
    file = Path(shutil.copy(copy / WEIGHTS, tmp_path / "single.safetensors"))
    single = open_model(model_dir, sources={"vae": file}).components["vae"]
    moved = Path(shutil.copy(file, tmp_path / "moved.safetensors"))
    again = open_model(model_dir, sources={"vae": moved}).components["vae"]
    assert single.fingerprint(tmp_path) == again.fingerprint(tmp_path)
    assert single.config_digest == own.components["vae"].config_digest


def test_a_component_that_the_model_itself_lacks_may_come_from_elsewhere(
    model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(model_dir, tmp_path / "bare"))
    shutil.rmtree(bare / "transformer")
    with pytest.raises(ModelError, match="transformer"):
        open_model(bare)
    where = sourced(bare, tmp_path, transformer=trained / "transformer")
    inspected(where)
    assert latents(where) == latents(
        sourced(model_dir, tmp_path, transformer=trained / "transformer")
    )


@pytest.mark.parametrize("key", ["in_channels", "joint_attention_dim"])
def test_a_component_that_does_not_fit_is_told_by_its_configuration(
    model_dir: Path, trained: Path, tmp_path: Path, key: str
) -> None:
    folder = Path(shutil.copytree(trained / "transformer", tmp_path / "t"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 48}))
    with pytest.raises(ModelError, match=rf"from .*/t has {key} 48, but the model's transformer"):
        open_model(model_dir, sources={"transformer": folder})


def test_a_component_of_another_class_or_kind_is_refused(
    model_dir: Path, tiny: Any, tmp_path: Path
) -> None:
    def refused(message: str, error: type[StageError] = ModelError, **sources: Path) -> None:
        with pytest.raises(error, match=message):
            open_model(model_dir, sources=sources)

    sdxl = tiny(OTHER)
    refused("is a UNet2DConditionModel, but the model's tr", transformer=sdxl / "unet")
    refused("'clip_text_model', but the model's text_encoder_2", text_encoder_2=sdxl)
    refused(r"names 'unet', but .* has .*transformer", RequestError, unet=sdxl)
    pickle = tmp_path / "vae.pt"
    pickle.write_bytes(b"\x80\x04.")
    refused("is a pickle, which can run code", vae=pickle)
    refused("is missing", vae=tmp_path / "none.safetensors")
    text = tmp_path / "notes.txt"
    text.write_text("no weights")
    refused("is a file, expected a folder, .safetensors or .gguf", vae=text)
    encoder = tmp_path / "encoder.safetensors"
    save_file({"a": torch.zeros(1)}, encoder)
    refused("CLIPTextModel of transformers does not read", text_encoder=encoder)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((model_dir / "vae" / WEIGHTS).read_bytes()[:-1])
    refused("incomplete download", vae=cut)


def test_a_single_file_of_another_model_is_found_before_it_loads(
    model_dir: Path, tiny: Any, tmp_path: Path
) -> None:
    unet = tiny(OTHER) / "unet" / WEIGHTS
    with pytest.raises(ModelError, match=r"neither the names of a FluxTransformer2DModel"):
        inspected(sourced(model_dir, tmp_path, transformer=unet))
    tensors = load_file(model_dir / "transformer" / WEIGHTS)
    name = next(name for name, each in tensors.items() if each.ndim == 2)
    wide = tmp_path / "wide.safetensors"
    save_file(tensors | {name: torch.zeros(7, 7)}, wide)
    with pytest.raises(ModelError, match=r"from|of .*wide.safetensors: tensor .*\(7, 7\) in its f"):
        inspected(sourced(model_dir, tmp_path, transformer=wide))


def test_a_single_file_may_have_the_names_of_the_models_makers(tiny: Any, tmp_path: Path) -> None:
    """A VAE as the checkpoints of Stable Diffusion have it, among the other models."""
    model_dir = tiny(OTHER)
    tensors = load_file(model_dir / "vae" / WEIGHTS)
    config = json.loads((model_dir / "vae" / "config.json").read_text())
    levels = len(config["block_out_channels"])
    renamed = {f"first_stage_model.{_as_ldm(name, levels)}": t for name, t in tensors.items()}
    path = tmp_path / "checkpoint.safetensors"
    others = {
        "model.diffusion_model.out.0.bias": torch.zeros(2),
        "cond_stage_model.x": torch.ones(1),
    }
    save_file(renamed | others, path)
    where = sourced(model_dir, tmp_path, vae=path)
    inspected(where, OTHER)
    made = latents(where, case=OTHER)
    png = [
        run_stage(request("decode", {}, made, family="sdxl"), each)[0]
        for each in (context(model_dir, tmp_path), where)
    ]
    assert png[0] == png[1]


def _as_ldm(name: str, levels: int) -> str:
    """A VAE's tensor's name in the layout of latent diffusion's own code."""
    name = name.replace("mid_block.resnets.0", "mid.block_1").replace(
        "mid_block.resnets.1", "mid.block_2"
    )
    for old, new in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v")):
        name = name.replace(f"mid_block.attentions.0.{old}", f"mid.attn_1.{new}")
    name = name.replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    parts = name.split(".")
    if parts[1] == "down_blocks":
        parts[1] = "down"
    if parts[1] == "up_blocks":
        parts[1:3] = ["up", str(levels - 1 - int(parts[2]))]
    name = ".".join(parts).replace(".resnets.", ".block.")
    return name.replace("samplers.0.conv", "sample.conv")


def test_a_forecast_takes_components_from_elsewhere_as_folders(
    model_dir: Path, trained: Path, tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(model_dir, tmp_path / "bare"))
    shutil.rmtree(bare / "transformer")
    elsewhere = {"transformer": trained / "transformer"}
    found = forecast_model(bare, sources=elsewhere, height=64, width=64)
    assert found.components == forecast_model(model_dir, height=64, width=64).components
    single = {"transformer": trained / "transformer" / WEIGHTS}
    with pytest.raises(RequestError, match="'transformer' comes from a single file, which is not"):
        forecast_model(model_dir, sources=single, height=64, width=64)


def test_sources_are_read_from_their_texts(tmp_path: Path) -> None:
    assert choose_sources(None) == choose_sources([]) == {}
    assert choose_sources("vae=/a/b=c.gguf") == {"vae": Path("/a/b=c.gguf")}
    assert choose_sources(["vae=x", "text_encoder_2=~/y"]) == {
        "vae": Path.cwd() / "x",
        "text_encoder_2": Path.home() / "y",
    }
    for bad in ("vae", "=x", "vae=", "Vae=x", "vae=a\0b"):
        with pytest.raises(RequestError, match="expected NAME=SOURCE"):
            choose_sources(bad)
    with pytest.raises(RequestError, match="names 'vae' twice"):
        choose_sources(["vae=x", "vae=y"])


def test_a_hub_id_is_found_in_the_cache_and_nowhere_else(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match=r"'org/name' is no folder .* hf download org/name"):
        choose_sources("vae=org/name")
    with pytest.raises(ModelError, match=r"not in the hub's cache .*/hub; fetch it"):
        resolve_model("org/name")
    cached = tmp_path / "hub" / "models--org--name"
    snapshot = cached / "snapshots" / "0a1b"
    shutil.copytree(model_dir, snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0a1b")
    assert resolve_model("org/name") == snapshot
    assert choose_sources(["vae=org/name", "transformer=org/name/transformer"]) == {
        "vae": snapshot,
        "transformer": snapshot / "transformer",
    }
    assert open_model(model_dir, sources=choose_sources("vae=org/name")).sources

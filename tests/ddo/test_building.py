"""Built from its configuration, a module is what its library's own loader makes of the folder."""

from __future__ import annotations

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from ddo import building
from ddo.building import build_from_config
from ddo.loading import load
from ddo.phases import Phases
from ddo.settings import OffloadSettings
from ddo.source import MappedFiles
from ddo.weight_files import SourceError, read_weight_files

WEIGHTS = "diffusion_pytorch_model.safetensors"


def flux():
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


def pixart():
    """Its table of positions is a buffer that is computed and not saved."""
    return diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=8,
        cross_attention_dim=16,
        in_channels=4,
        out_channels=8,
        use_additional_conditions=False,
    )


def wan():
    """Some of its weights are to be in single precision whatever the others are in."""
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
    )


def autoencoder():
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)


def saved(make, folder, dtype):
    """As its library saves it in a dtype."""
    torch.manual_seed(3)
    module = make()
    whole = folder / "whole"
    module.save_pretrained(whole)
    type(module).from_pretrained(whole, dtype=dtype).save_pretrained(folder)
    return type(module)


def build(model_class, folder, dtype):
    setup = Phases()
    module = build_from_config(model_class, folder, read_weight_files(folder), dtype, setup)
    return module, setup.seconds


def assert_equal(found, expected):
    assert type(found) is type(expected)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name
    assert dict(found.config) == dict(expected.config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [flux, pixart, wan, autoencoder])
def test_a_module_equals_the_one_of_its_own_loader(tmp_path, make, dtype):
    model_class = saved(make, tmp_path, dtype)
    expected = model_class.from_pretrained(tmp_path, dtype=dtype)
    module, seconds = build(model_class, tmp_path, dtype)
    assert_equal(module, expected)
    assert list(seconds) == ["build", "associate"]
    mapped = MappedFiles()
    for name, parameter in module.named_parameters():
        place = mapped.find(parameter.data_ptr(), parameter.nbytes)
        assert place is not None, f"{name} is no longer in its file"


def test_tables_are_computed_in_the_dtype_of_the_weights(tmp_path):
    model_class = saved(pixart, tmp_path, torch.bfloat16)
    module, _ = build(model_class, tmp_path, torch.bfloat16)
    buffers = dict(module.named_buffers())
    assert buffers
    assert not any(name in load_file(tmp_path / WEIGHTS) for name in buffers)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("make", [flux, wan])
def test_weights_that_are_to_be_converted_are_left_to_the_loader(tmp_path, make):
    model_class = saved(make, tmp_path, torch.float32)
    assert build(model_class, tmp_path, torch.bfloat16)[0] is None
    expected = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with load(
        model_class, tmp_path, OffloadSettings(), dtype=torch.bfloat16, device="cpu"
    ) as session:
        assert_equal(session.module, expected)


def test_weights_of_other_names_are_left_to_the_loader(tmp_path):
    """Autoencoders of before 2023 name their attention's matrices otherwise."""
    model_class = saved(autoencoder, tmp_path, torch.float32)
    state = load_file(tmp_path / WEIGHTS)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = dict(state)
    for new_part, old_part in old.items():
        renamed = {n.replace(f".{new_part}.", f".{old_part}."): t for n, t in renamed.items()}
    assert renamed.keys() != state.keys()
    save_file(renamed, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert build(model_class, tmp_path, torch.float32)[0] is None
    with load(model_class, tmp_path, OffloadSettings(), device="cpu") as session:
        found = session.module.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_missing_tensor_is_an_error_all_the_same(tmp_path):
    model_class = saved(flux, tmp_path, torch.float32)
    state = load_file(tmp_path / WEIGHTS)
    del state["proj_out.bias"]
    save_file(state, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"1 tensors are missing: proj_out\.bias"):
        load(model_class, tmp_path, OffloadSettings(), device="cpu")


def test_a_constructor_that_fails_leaves_torch_as_it_was(tmp_path, monkeypatch):
    model_class = saved(flux, tmp_path, torch.bfloat16)
    register = torch.nn.Module.register_parameter

    def fail(config):
        raise RuntimeError("no room")

    monkeypatch.setattr(model_class, "from_config", fail)
    with pytest.raises(RuntimeError, match="no room"):
        build(model_class, tmp_path, torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32
    assert torch.nn.Module.register_parameter is register
    assert not building._patching.locked()

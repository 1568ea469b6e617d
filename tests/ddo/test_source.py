from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ddo.source import MappedFiles, associate, byte_view, is_dense, materialize
from ddo.weight_files import SourceError, read_weight_files


class Tied(nn.Module):
    """Two layers that share a weight, a persistent buffer and one that is computed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def forward(self, ids):
        return self.head(self.inner(self.embed(ids)) + self.mean * self.inv_freq)


def on_meta():
    """The module as a loader builds it: weights without values, computed buffers with them."""
    module = Tied()
    inv_freq = module.inv_freq
    module.to("meta")
    module.inv_freq = inv_freq
    module.head.weight = module.embed.weight  # moving tore them apart
    return module.requires_grad_(False)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    module = Tied().requires_grad_(False)
    state = {k: v.clone() for k, v in module.state_dict().items() if k != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return module, tmp_path


def load(folder, module=None, **options):
    module = on_meta() if module is None else module
    files = read_weight_files(folder)
    materialize(module, files, associate(module, files, **options))
    return module


def test_every_tensor_gets_its_bytes_and_ties_stay_ties(saved):
    reference, folder = saved
    module = load(folder)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.inv_freq, torch.arange(4.0))
    ids = torch.tensor([0, 3])
    assert torch.equal(module(ids), reference(ids))


def test_loading_reads_no_weight_and_writes_no_file(saved):
    _, folder = saved
    before = (folder / "model.safetensors").read_bytes()
    module = load(folder)
    source = MappedFiles().find(module.inner.weight.data_ptr(), module.inner.weight.nbytes)
    assert source is not None
    assert source.path == str(folder / "model.safetensors")
    with torch.no_grad():
        module.inner.weight.fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("prefix", ["model.", "transformer.h."])
def test_a_prefix_that_only_the_files_have_is_seen_through(saved, tmp_path, prefix):
    reference, folder = saved
    state = load_file(folder / "model.safetensors")
    head = prefix.split(".", 1)[0] + "."
    save_file({head + k: v for k, v in state.items()}, folder / "model.safetensors")
    assert torch.equal(load(folder).inner.bias, reference.inner.bias)


def test_a_prefix_that_only_the_module_has_is_seen_through(saved):
    reference, folder = saved
    wrapper = nn.Module()
    wrapper.model = on_meta()
    assert torch.equal(load(folder, wrapper).model.inner.bias, reference.inner.bias)


def test_names_may_be_translated(saved):
    reference, folder = saved
    state = load_file(folder / "model.safetensors")
    save_file({"x" + k: v for k, v in state.items()}, folder / "model.safetensors")
    module = load(folder, rename=lambda name: "x" + name)
    assert torch.equal(module.inner.bias, reference.inner.bias)
    table = {name: "x" + name for name in state}
    assert torch.equal(load(folder, rename=table).inner.bias, reference.inner.bias)


def change(folder, **tensors):
    state = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        key = name.replace("__", ".")
        if value is None:
            del state[key]
        else:
            state[key] = value
    save_file(state, folder / "model.safetensors")


def test_missing_and_left_over_tensors_are_named_together(saved):
    _, folder = saved
    change(folder, inner__bias=None, other=torch.zeros(1))
    message = r"1 tensors are missing: inner\.bias; 1 tensors are left over: other"
    with pytest.raises(SourceError, match=message):
        load(folder)


def test_tensors_may_be_left_over_when_the_caller_says_so(saved):
    _, folder = saved
    change(folder, other=torch.zeros(1))
    load(folder, may_be_left=["^other$"])


def test_another_shape_is_refused_with_both_shapes(saved):
    _, folder = saved
    change(folder, inner__bias=torch.zeros(5))
    with pytest.raises(SourceError, match=r"'inner.bias' has shape \(5,\) .* expects \(4,\)"):
        load(folder)


def test_integers_in_place_of_floats_are_refused(saved):
    _, folder = saved
    change(folder, inner__bias=torch.zeros(4, dtype=torch.int8))
    with pytest.raises(SourceError, match=r"is torch\.int8 .* the module expects torch\.float32"):
        load(folder)


def test_a_module_without_values_is_refused_even_if_no_file_is_to_blame(saved):
    _, folder = saved
    module = on_meta()
    module.register_buffer("extra", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(SourceError, match="1 tensors of Tied have no values: extra"):
        load(folder, module)


def test_a_file_replaced_between_check_and_use_is_refused(saved):
    _, folder = saved
    module = on_meta()
    files = read_weight_files(folder)
    found = associate(module, files)
    change(folder, inner__bias=torch.ones(4))
    with pytest.raises(SourceError, match="has changed since it was read"):
        materialize(module, files, found)


def test_a_file_that_was_replaced_is_no_source_for_what_was_mapped(saved):
    """The mapping keeps the old bytes, the path has new ones."""
    _, folder = saved
    module = load(folder)
    path = folder / "model.safetensors"
    copy = folder / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    assert MappedFiles().find(module.inner.weight.data_ptr(), 64) is None


def test_memory_that_no_file_backs_has_no_file():
    assert MappedFiles().find(torch.zeros(8).data_ptr(), 32) is None


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3)[:, :2], False),
        (torch.zeros(1).expand(4), False),
        (torch.zeros(0), True),
        (torch.tensor(1.0), True),
    ],
)
def test_only_dense_tensors_move_as_bytes(tensor, dense):
    assert is_dense(tensor) is dense
    view = byte_view(tensor)
    assert (view is not None) is dense
    if dense:
        assert view.numel() == tensor.numel() * tensor.element_size()

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddo.blocks import take_inventory
from ddo.host_sources import HostSources, map_shared
from ddo.source import MappedFiles, byte_view
from ddo.weight_files import FileIdentity, read_weight_files
from tests.ddo.modules import make_net


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path)


def blind(folder):
    """Sources whose kernel tells nothing about mappings."""
    return HostSources(read_weight_files(folder), MappedFiles(folder / "no such table"))


def test_a_mapped_weight_is_found_by_address_whatever_its_name(net, tmp_path):
    weight = net.layers[0].up.weight
    _, offset, memory = HostSources().locate(["any name"], byte_view(weight.data))
    stored = read_weight_files(tmp_path).tensors["layers.0.up.weight"]
    assert offset == stored.offset
    assert torch.equal(memory[offset : offset + weight.nbytes], byte_view(weight.data))


def test_without_addresses_a_weight_is_found_by_name_if_its_bytes_are_the_same(net, tmp_path):
    name = "layers.0.up.weight"
    weight = net.layers[0].up.weight.clone()
    found = blind(tmp_path).locate([name], byte_view(weight))
    assert found is not None
    assert found[1] == read_weight_files(tmp_path).tensors[name].offset
    assert blind(tmp_path).locate(["layers.1.up.weight"], byte_view(weight)) is None
    assert blind(tmp_path).locate(["layers.0.up.bias"], byte_view(weight)) is None
    assert blind(tmp_path).locate(["unknown"], byte_view(weight)) is None
    assert (
        HostSources(None, MappedFiles(tmp_path / "none")).locate([name], byte_view(weight)) is None
    )


@pytest.mark.parametrize("where", [0, 383, 767])
def test_a_weight_that_was_changed_at_an_end_or_in_the_middle_is_no_longer_the_files(
    net, tmp_path, where
):
    weight = net.layers[0].up.weight.clone()
    weight.view(-1)[where] += 1
    assert blind(tmp_path).locate(["layers.0.up.weight"], byte_view(weight)) is None


def test_hints_serve_modules_whose_library_has_copied_the_weights(tmp_path):
    make_net(tmp_path)
    copied = make_net()
    copied.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    hints = read_weight_files(tmp_path)
    assert take_inventory(copied, torch.device("cpu")).own_memory_bytes > 0
    # The convolution's axes lie in another order in memory than in the file, formally.
    left = 0 if copied.conv.weight.is_contiguous() else copied.conv.weight.nbytes
    assert take_inventory(copied, torch.device("cpu"), hints).own_memory_bytes == left


def test_a_file_that_is_another_one_by_now_is_not_mapped(net, tmp_path):
    path = tmp_path / "model.safetensors"
    identity = FileIdentity.of(path)
    assert map_shared(path, identity) is not None
    save_file({"x": torch.zeros(3)}, path)
    assert map_shared(path, identity) is None
    path.unlink()
    assert map_shared(path, identity) is None

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddo.blocks import NotOwnable, take_inventory
from ddo.owning import why_not_ownable
from ddo.weight_files import SourceError
from tests.ddo.modules import Net, make_net

CPU = torch.device("cpu")


def blocks_of(module):
    return {block.name: block for block in take_inventory(module, CPU).blocks}


def test_every_weight_is_in_exactly_one_block(tmp_path):
    """Invariant 8."""
    net = make_net(tmp_path)
    members = [m for block in take_inventory(net, CPU).blocks for m in block.members]
    assert sorted(id(m.tensor) for m in members) == sorted(id(p) for p in net.parameters())


def test_a_tied_weight_is_a_block_that_every_user_acquires():
    net = Net()
    tied = blocks_of(net)["head"]
    assert set(tied.users) == {net.head, net.embed}
    assert [m.name for m in tied.members] == ["head.weight"]


def test_weights_beside_children_stay():
    blocks = blocks_of(Net())
    assert blocks["layers.0"].must_stay == "used beside the modules inside of its own"
    assert blocks["layers.0.up"].must_stay == ""


def test_a_module_that_reads_its_childrens_weights_is_one_block():
    net = Net()
    block = blocks_of(net)["attention"]
    assert block.users == (net.attention,)
    assert {m.name for m in block.members} == {
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
    }
    assert block.must_stay == ""


def test_a_parametrized_layer_is_one_block():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    (block,) = take_inventory(nn.Sequential(layer), CPU).blocks
    assert block.users == (layer,)
    assert len(block.members) == 3


def test_a_small_first_weight_stays_and_a_large_one_does_not():
    small_first = nn.Sequential(nn.Linear(2, 2), *(nn.Linear(64, 64) for _ in range(4)))
    large_first = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert take_inventory(small_first, CPU).blocks[0].must_stay
    assert not take_inventory(large_first, CPU).blocks[0].must_stay


def test_blocks_of_mapped_files_copy_from_the_page_cache(tmp_path):
    net = make_net(tmp_path)
    inventory = take_inventory(net, CPU)
    assert inventory.own_memory_bytes == 0
    for block in inventory.blocks:
        found = {(m.found.data_ptr(), m.found.nbytes) for m in block.members}
        assert all(copy.memory.data_ptr() not in {a for a, _ in found} for copy in block.copies)
        assert sum(copy.memory.numel() for copy in block.copies) == sum(n for _, n in found)


def test_weights_without_a_file_are_counted():
    net = make_net()
    nbytes = sum(parameter.nbytes for parameter in net.parameters())
    assert take_inventory(net, CPU).own_memory_bytes == nbytes


def test_weights_that_share_elements_or_have_no_values_are_refused():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(1).expand(4, 4), requires_grad=False)
    with pytest.raises(NotOwnable, match=r"weight '0\.weight' shares elements"):
        take_inventory(nn.Sequential(layer), CPU)
    with pytest.raises(SourceError, match=r"weight 'weight' has no values"):
        take_inventory(nn.Linear(4, 4, device="meta"), CPU)


def test_an_ordinary_module_can_be_owned():
    assert why_not_ownable(Net()) is None

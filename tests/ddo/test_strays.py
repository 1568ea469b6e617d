from __future__ import annotations

import torch
from torch import nn

from ddo.blocks import take_inventory
from ddo.strays import StrayFinder
from tests.ddo.modules import Layer


class Peeking(nn.Module):
    """Uses the weight of a layer without calling the layer."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.peeked = nn.Linear(4, 4)
        self.requires_grad_(False)

    def forward(self, x):
        return self.called(x) @ self.peeked.weight.t()[:, :2]


def test_weights_used_outside_of_their_layer_are_found_and_lent():
    net, x = Peeking(), torch.randn(2, 4)
    expected = net(x)
    blocks = take_inventory(net, torch.device("cpu")).blocks
    names = [block.name for block in blocks]
    finder = StrayFinder([(1, blocks[names.index("peeked")])], torch.device("cpu"))
    with finder:
        assert torch.equal(net(x), expected)
    assert finder.found == {1}


def test_a_step_without_strays_finds_none():
    net = Peeking()
    blocks = take_inventory(net, torch.device("cpu")).blocks
    finder = StrayFinder(enumerate(blocks[:0]), torch.device("cpu"))
    with finder:
        net(torch.randn(2, 4))
    assert finder.found == set()


def test_compiled_blocks_run_uncompiled_while_strays_are_looked_for():
    net, x = Peeking(), torch.randn(2, 4)
    net.called = Layer(4).requires_grad_(False)
    net.called.compile(backend="eager", fullgraph=True)
    expected = net(x)
    blocks = take_inventory(net, torch.device("cpu")).blocks
    finder = StrayFinder(enumerate(blocks), torch.device("cpu"))
    assert finder.ran_uncompiled
    with finder:
        assert torch.allclose(net(x), expected)
    assert "peeked" in {blocks[number].name for number in finder.found}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(net(x), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_weight_that_is_copied_to_the_device_is_no_stray():
    """The ring's own copies are no use of a weight outside of its layer."""
    net = Peeking()
    blocks = take_inventory(net, torch.device("cpu")).blocks
    slot = torch.empty_like(net.peeked.weight)
    with StrayFinder(enumerate(blocks), torch.device("cpu")) as finder:
        slot.copy_(net.peeked.weight)
    assert finder.found == set()
    assert torch.equal(slot, net.peeked.weight)

"""Small modules with everything that makes offloading hard, and ways to compare them."""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from torch import nn

from ddo.source import associate, materialize
from ddo.weight_files import read_weight_files


class Layer(nn.Module):
    """A transformer block in miniature: norm, two matrices, and a table beside its children."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, a tied head, a buffer that is computed and one that is saved."""

    def __init__(self, width=16, depth=6, vocabulary=11):
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(1.0, width + 1), persistent=False)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, ids):
        x = self.embed(ids) / self.inv_freq - self.mean
        for layer in self.layers:
            x = layer(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x[:, None]).mean(1)
        return self.head(x)


IDS = torch.tensor([[1, 5, 9, 0], [3, 3, 10, 2]])


def make_net(folder=None, *, seed=0, dtype=torch.float32, **options):
    """A net in evaluation mode; out of a mapped file if there is a folder for it."""
    torch.manual_seed(seed)
    net = Net(**options).to(dtype).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
        net.conv.weight.data = net.conv.weight.data.to(memory_format=torch.channels_last)
        net.mean.fill_(0.25)
    if folder is None:
        return net
    state = {k: v.contiguous() for k, v in net.state_dict().items() if k != "head.weight"}
    save_file(state, folder / "model.safetensors")
    return load_net(folder, dtype=dtype, **options)


def load_net(folder, *, dtype=torch.float32, **options):
    """The same net with mapped weights."""
    net = Net(**options).to(dtype).eval().requires_grad_(False)
    inv_freq = net.inv_freq
    net.to("meta")
    net.inv_freq = inv_freq
    net.head.weight = net.embed.weight
    files = read_weight_files(folder)
    materialize(net, files, associate(net, files))
    return net


def run(net, ids=IDS):
    with torch.no_grad():
        return net(ids)


def photograph(module):
    """Everything that has to be the same after detaching."""
    return {
        "tensors": [
            (name, id(t), t.data_ptr(), t.device, t.dtype, t.stride(), t.requires_grad, type(t))
            for name, t in (*module.named_parameters(), *module.named_buffers())
        ],
        "values": {name: t.clone() for name, t in module.state_dict().items()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for m in module.modules()
        ],
        "forward": [vars(m).get("forward") for m in module.modules()],
        "training": [m.training for m in module.modules()],
    }


def assert_same(before, after):
    assert before["tensors"] == after["tensors"]
    assert before["hooks"] == after["hooks"]
    assert before["forward"] == after["forward"]
    assert before["training"] == after["training"]
    assert before["values"].keys() == after["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(value, after["values"][name]), name

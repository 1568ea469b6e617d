"""Weights of many tensors, with classes of our own in place of the libraries'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddo.blocks import take_inventory
from ddo.inner import Shell, class_name, find_obstacle_in, inner_tensors, shells
from ddo.lifecycle import OffloadSession
from ddo.settings import OffloadSettings
from tests.ddo.fake_backend import FakeBackend

CPU = torch.device("cpu")


class Packed(torch.Tensor):
    """A wrapper of integers. Where it says to be is told by its context."""

    @staticmethod
    def __new__(cls, integers, device="cpu"):
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=integers.dtype, device=device
        )

    def __init__(self, integers, device="cpu"):
        self.integers = integers

    def __tensor_flatten__(self):
        return ["integers"], Packed.says_to_be_on

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Packed(inner["integers"], context)

    says_to_be_on = "cpu"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].integers)
        return NotImplemented


class Scaled(torch.Tensor):
    """A wrapper around a wrapper and a scale, which computes with both."""

    @staticmethod
    def __new__(cls, packed, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=scale.dtype, device=packed.device
        )

    def __init__(self, packed, scale):
        self.packed = packed
        self.scale = scale

    def __tensor_flatten__(self):
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(inner["packed"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.packed.integers * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].packed.detach(), args[0].scale.detach())
        return NotImplemented


def scaled(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    return Scaled(Packed(integers), torch.rand(rows, 1, generator=generator) / 100)


def quantized_layers(depth=6, width=32):
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    for seed, layer in enumerate(layers):
        layer.weight = nn.Parameter(scaled(width, width, seed), requires_grad=False)
    return layers.requires_grad_(False)


def test_the_plain_tensors_of_nested_wrappers_are_found():
    weight = scaled(4, 4)
    found = {inner.path: inner.tensors for inner in inner_tensors(weight, nn.Linear(4, 4))}
    assert found.keys() == {"packed.integers", "scale"}
    assert found["packed.integers"][0] is weight.packed.integers
    assert found["scale"][0] is weight.scale
    assert find_obstacle_in(weight) is None


def test_a_wrapper_is_where_its_tensors_are(monkeypatch):
    wrapper = Packed(torch.zeros(3, dtype=torch.int8))
    shell = Shell(wrapper)
    monkeypatch.setattr(Packed, "says_to_be_on", "cuda:0")
    shell.place()
    assert wrapper.device == torch.device("cuda", 0)
    shell.restore()
    assert wrapper.device == CPU
    shell.place()
    assert wrapper.is_cuda
    assert type(wrapper) is Packed


def test_inner_wrappers_are_placed_before_those_around_them():
    weight = scaled(4, 4)
    assert [type(shell._wrapper) for shell in shells(weight)] == [Packed, Scaled]


@pytest.mark.parametrize("preset", ["stream", "low_memory"])
@pytest.mark.parametrize("seed", range(4))
def test_a_module_of_wrappers_streams_with_equal_results(preset, seed):
    layers, x = quantized_layers(), torch.randn(3, 32)
    expected = layers(x)
    before = [(id(w), [t.data_ptr() for i in inner_tensors(w, layers) for t in i.tensors])
              for w in layers.parameters()]  # fmt: skip
    total = sum(block.nbytes for block in take_inventory(layers, CPU).blocks)
    settings = OffloadSettings(preset=preset, device_budget=int(0.7 * total), reserve=1)
    backend = FakeBackend(seed, needs_pins=True)
    with OffloadSession(layers, settings, backend) as session, backend.reading():
        for _ in range(4):
            assert torch.equal(layers(x), expected)
        assert session.plan.mode == "stream"
    after = [(id(w), [t.data_ptr() for i in inner_tensors(w, layers) for t in i.tensors])
             for w in layers.parameters()]  # fmt: skip
    assert after == before
    assert torch.equal(layers(x), expected)


class State:
    """What a library keeps beside a weight."""

    def __init__(self, absmax, code, nested=None):
        self.absmax = absmax
        self.code = code
        self.nested = nested


class Params4bit(nn.Parameter):
    """Bytes with a state, as bitsandbytes has them."""

    def __new__(cls, data, state):
        weight = torch.Tensor._make_subclass(cls, data, False)
        weight.quant_state = state
        weight.bnb_quantized = True
        return weight


class Linear4bit(nn.Module):
    def __init__(self, code, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 16, (32, 32), dtype=torch.uint8, generator=generator)
        state = State(torch.rand(32, 1, generator=generator), code)
        state.nested = State(torch.rand(1, generator=generator), code)
        self.weight = Params4bit(data, state)
        self.state = state
        self.copy = self.weight.data  # the same memory under another object

    def forward(self, x):
        state = self.weight.quant_state
        values = state.code[self.weight.data.long()] * state.absmax * state.nested.absmax
        assert self.copy.data_ptr() == self.weight.data_ptr()
        return x @ values


@pytest.fixture
def library(monkeypatch):
    for kind in (State, Params4bit, Linear4bit):
        monkeypatch.setattr(kind, "__module__", "bitsandbytes.nn.modules")


def test_tensors_beside_a_weight_move_with_it_and_shared_ones_stay(library):
    code = torch.linspace(-1, 1, 16)
    layers = nn.Sequential(*(Linear4bit(code, seed) for seed in range(6)))
    x = torch.randn(2, 32)
    expected = layers(x)
    blocks = {block.name: block for block in take_inventory(layers, CPU).blocks}
    assert [member.name for member in blocks["2"].members] == [
        "2.weight",
        "2.weight.quant_state.absmax",
        "2.weight.quant_state.nested.absmax",
    ]
    assert len(blocks["2"].members[0].others) == 1
    [shared] = [block for block in blocks.values() if len(block.users) > 1]
    assert shared.must_stay == "table that several quantized weights share"
    total = sum(block.nbytes for block in blocks.values())
    settings = OffloadSettings(preset="low_memory", device_budget=int(0.8 * total), reserve=1)
    backend = FakeBackend(1, needs_pins=True)
    with OffloadSession(layers, settings, backend) as session, backend.reading():
        for _ in range(3):
            assert torch.equal(layers(x), expected)
        assert session.plan.mode == "stream"
    assert torch.equal(layers(x), expected)


def test_weights_that_are_not_what_they_will_be_are_told_apart(library):
    code = torch.linspace(-1, 1, 16)
    weight = Linear4bit(code, 0).weight
    assert find_obstacle_in(weight) is None
    weight.bnb_quantized = False
    found = find_obstacle_in(weight)
    assert found.reason == "a bitsandbytes.Params4bit that is not quantized yet"
    assert not found.may_be_grouped
    assert not found.may_be_resident
    weight.bnb_quantized = True
    weight.quant_state.packing_format_for_cpu = True
    assert "packed for this CPU" in find_obstacle_in(weight).reason


def test_libraries_that_share_a_namespace_are_told_by_both_names(monkeypatch):
    monkeypatch.setattr(Packed, "__module__", "optimum.quanto.tensor.packed")
    assert class_name(Packed(torch.zeros(1))) == "optimum.quanto.Packed"

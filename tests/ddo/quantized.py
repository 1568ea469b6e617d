"""Small modules quantized by each library, in evaluation mode, on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.ddo.modules import Layer

WIDTH = 64


class Tower(nn.Module):
    """Transformer blocks in miniature between a plain projection and a plain head."""

    def __init__(self, width=WIDTH, depth=4):
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, 8)

    def forward(self, x):
        x = self.proj_in(x)
        for layer in self.layers:
            x = layer(x)
        return self.proj_out(x)


def make_tower(kind, **options):
    """A tower whose blocks are quantized; skips where the library is missing."""
    torch.manual_seed(0)
    tower = Tower(**options).to(torch.bfloat16).eval().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, when they are imported
        _QUANTIZE[kind](tower.layers)
    return tower.requires_grad_(False)


def make_input(width=WIDTH, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, width, generator=generator).to(torch.bfloat16).to(device)


def run(tower, x):
    with torch.no_grad():
        return tower(x)


def _torchao(config_of):
    def quantize(layers):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(layers, config_of(quantization))

    return quantize


def _quanto(name, **options):
    def quantize(layers):
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(layers, weights=getattr(quanto, name), **options)
        quanto.freeze(layers)

    return quantize


def _replace_linears(layers, replacement):
    for layer in layers:
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Linear):
                setattr(layer, name, replacement(child))


def _nf4(layers):
    bnb = pytest.importorskip("bitsandbytes")

    def replacement(linear):
        new = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
        )
        new.load_state_dict(linear.state_dict())
        new.support_avx512bf16_for_cpu = False  # else the first call packs weights for this CPU
        return new.to(device="cpu")  # this quantizes

    _replace_linears(layers, replacement)


def _int8(layers):
    bnb = pytest.importorskip("bitsandbytes")

    def replacement(linear):
        new = bnb.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
        )
        new.load_state_dict(linear.state_dict())
        return new.to("cpu")  # this quantizes

    _replace_linears(layers, replacement)


def _gguf(name):
    def quantize(layers):
        gguf = pytest.importorskip("gguf")
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        kind = gguf.GGMLQuantizationType[name]

        def replacement(linear):
            new = GGUFLinear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=torch.bfloat16,
            )
            packed = gguf.quants.quantize(linear.weight.float().numpy(), kind)
            new.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
            new.bias = linear.bias
            return new

        _replace_linears(layers, replacement)

    return quantize


_QUANTIZE = {
    "torchao int8": _torchao(lambda q: q.Int8WeightOnlyConfig()),
    "torchao int4": _torchao(lambda q: q.IntxWeightOnlyConfig(torch.int4)),
    "torchao float8": _torchao(lambda q: q.Float8WeightOnlyConfig()),
    "quanto int8": _quanto("qint8"),
    "quanto int4": _quanto("qint4"),
    "quanto float8": _quanto("qfloat8"),
    "bitsandbytes nf4": _nf4,
    "bitsandbytes int8": _int8,
    "gguf Q8_0": _gguf("Q8_0"),
    "gguf Q4_0": _gguf("Q4_0"),
}
KINDS = tuple(_QUANTIZE)
PORTABLE = tuple(kind for kind in KINDS if "bitsandbytes" not in kind)

"""A transformer that diffusers quantizes with torchao, from its files to its last step."""

from __future__ import annotations

import warnings

import pytest
import torch

import ddo
from tests.ddo import flux
from tests.ddo.fake_backend import FakeBackend

SETTINGS = ddo.OffloadSettings(
    preset="low_memory", device_budget=200_000, reserve=1, link_rate="1GB"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A transformer as it was trained, in bfloat16."""
    folder = tmp_path_factory.mktemp("transformer")
    flux.make_transformer().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def quantized(folder):
    """The same, quantized by diffusers while it loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, when they are imported
        torchao = pytest.importorskip("torchao.quantization")
        from diffusers import FluxTransformer2DModel, TorchAoConfig

        return FluxTransformer2DModel.from_pretrained(
            folder,
            quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()),
            dtype=torch.bfloat16,
        )


def run(transformer):
    return flux.run(transformer, torch.bfloat16)


def test_a_transformer_that_diffusers_quantizes_streams(quantized):
    expected = run(quantized)
    with ddo.attach(quantized, SETTINGS, backend=FakeBackend(1)) as session:
        assert session.plan.mode == "stream"
        for _ in range(3):
            assert torch.equal(run(quantized), expected)
    assert torch.equal(run(quantized), expected)


def test_a_folder_of_quantized_weights_is_loaded_and_streams_from_its_files(quantized, tmp_path):
    expected = run(quantized)
    quantized.save_pretrained(tmp_path)
    with ddo.load(type(quantized), tmp_path, SETTINGS, backend=FakeBackend(2)) as session:
        assert session.plan.mode == "stream"
        weight = session.module.transformer_blocks[0].attn.to_q.weight
        assert type(weight).__name__ == "Int8Tensor"
        for _ in range(3):
            assert torch.equal(run(session.module), expected)
        own = session.report().own_memory_bytes
    total = sum(block["nbytes"] for block in session.report().plan["blocks"])
    assert own < total / 4, "only scales and zero points are copied in host memory"

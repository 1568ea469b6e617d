from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Model

from ddo.building import weights_on_meta
from ddo.loading import load
from ddo.settings import OffloadSettings
from ddo.weight_files import SourceError
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.modules import IDS, Net, make_net, photograph, run
from tests.support.tiny_models import z_image


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A tiny diffusion model in bfloat16."""
    return z_image(tmp_path_factory.mktemp("model") / "z", dtype=torch.bfloat16)


def settings(budget, **others):
    return OffloadSettings(device_budget=budget + 1, reserve=1, link_rate="1GB", **others)


def denoise(transformer):
    """Three calls as a pipeline makes them."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    latents, caption = noise(16, 1, 8, 8), noise(5, 16)
    with torch.no_grad():
        for step in range(3):
            time = torch.tensor([step / 3], dtype=torch.bfloat16)
            latents = latents - transformer([latents], time, [caption])[0][0]
    return latents


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("preset", "budget"), [("stream", 600_000), ("low_memory", 550_000)])
def test_a_diffusion_transformer_denoises_to_the_same_bits(pipeline, preset, budget, seed):
    folder = pipeline / "transformer"
    reference = ZImageTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    expected = denoise(reference)
    backend = FakeBackend(seed)
    with load(
        ZImageTransformer2DModel, folder, settings(budget, preset=preset), backend=backend
    ) as session:
        assert session.plan.mode == "stream"
        with backend.reading():
            assert torch.equal(denoise(session.module), expected)
            assert torch.equal(denoise(session.module), expected)
        report = session.report()
        assert report.own_memory_bytes == 0
        assert report.num_steps == 6
        phases = "read_headers build associate measure_link find_sources plan register first_fill"
        assert list(report.setup_s) == [*phases.split(), "make_ring"]
        assert all(seconds >= 0 for seconds in report.setup_s.values())
        assert report.copied_bytes_per_step > 0


@pytest.mark.parametrize("seed", range(2))
def test_an_autoencoder_decodes_to_the_same_bits(pipeline, seed):
    folder = pipeline / "vae"
    reference = AutoencoderKL.from_pretrained(folder, dtype=torch.bfloat16).eval()
    latents = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        expected = reference.decode(latents).sample
    backend = FakeBackend(seed)
    with (
        load(AutoencoderKL, folder, settings(60_000, preset="stream"), backend=backend) as session,
        torch.no_grad(),
        backend.reading(),
    ):
        for _ in range(3):
            assert torch.equal(session.module.decode(latents).sample, expected)
        assert session.report().num_steps == 3


def test_a_text_encoder_encodes_to_the_same_bits(pipeline):
    folder = pipeline / "text_encoder"
    reference = Qwen3Model.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        expected = reference(IDS).last_hidden_state
    backend = FakeBackend(0)
    with (
        load(Qwen3Model, folder, settings(20_000, preset="stream"), backend=backend) as session,
        torch.no_grad(),
        backend.reading(),
    ):
        for _ in range(3):
            assert torch.equal(session.module(IDS).last_hidden_state, expected)
        assert session.report().own_memory_bytes == 0


def test_a_tensor_that_the_library_would_invent_is_an_error(pipeline, tmp_path):
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        (tmp_path / name).write_bytes((pipeline / "transformer" / name).read_bytes())
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    del state["layers.0.attention.to_q.weight"]
    save_file(state, path)
    with pytest.raises(SourceError, match=r"1 tensors are missing: layers\.0\.attention\.to_q"):
        load(ZImageTransformer2DModel, tmp_path, settings(60_000), backend=FakeBackend())


def test_damaged_files_are_found_before_anything_is_built(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"1234567")
    with pytest.raises(SourceError, match="file has 7 bytes"):
        load(None, tmp_path, settings(60_000), backend=FakeBackend())


def test_any_class_can_be_built_and_bound_by_name(tmp_path):
    expected = run(make_net(tmp_path))
    with load(Net, tmp_path, settings(15_000), build=Net, backend=FakeBackend()) as session:
        net = session.module
        assert torch.equal(run(net), expected)
        assert net.head.weight is net.embed.weight
        assert not net.training
        assert torch.equal(net.inv_freq.cpu(), torch.arange(1.0, 17.0))


def test_building_on_meta_takes_no_memory_for_weights_and_keeps_buffers():
    with weights_on_meta():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert not net.inv_freq.is_meta
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


def test_loading_takes_no_anonymous_memory_for_weights(tmp_path):
    def build():
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    with torch.no_grad():
        state = {f"{k}.weight": torch.full((1024, 1024), float(k)) for k in range(16)}
    save_file(state, tmp_path / "model.safetensors")
    del state
    gc.collect()
    before = anonymous_bytes()
    with load(None, tmp_path, OffloadSettings(), build=build, device="cpu") as session:
        taken = anonymous_bytes() - before
        assert session.module[3].weight[0, 0] == 3.0
    assert taken < 8 << 20, "64 MiB of weights were copied"


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


def test_loading_on_a_cpu_keeps_weights_mapped(tmp_path):
    make_net(tmp_path)
    with load(Net, tmp_path, OffloadSettings(), build=Net, device="cpu") as session:
        assert list(session.report().setup_s) == ["read_headers", "build", "associate"]
        before = photograph(session.module)["tensors"]
        run(session.module)
        assert photograph(session.module)["tensors"] == before

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddo.attaching import attach, why_no_pool
from ddo.blocks import NotOwnable
from ddo.settings import OffloadSettings, SettingsError
from ddo.torch_backend import DeviceError
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.modules import assert_same, load_net, make_net, photograph, run
from tests.ddo.test_lifecycle import Quantized


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path)


@pytest.mark.parametrize("preset", ["auto", "stream", "resident", "low_memory"])
def test_on_a_cpu_nothing_moves(net, preset):
    before = photograph(net)
    expected = run(net)
    with attach(net, OffloadSettings(preset=preset), device="cpu") as session:
        assert session.plan.mode == "mapped"
        assert_same(before, photograph(net))
        assert torch.equal(run(net), expected)
        assert session.report().copied_bytes == 0


def test_off_leaves_the_module_alone(net):
    before = photograph(net)
    with attach(net, OffloadSettings(preset="off"), backend=FakeBackend()) as session:
        assert session.plan.mode == "off"
        assert_same(before, photograph(net))


def test_a_module_on_meta_is_attached_with_its_files(net, tmp_path):
    expected = run(net)
    fresh = load_net(tmp_path)
    inv_freq = fresh.inv_freq
    fresh.to("meta")
    fresh.inv_freq = inv_freq
    fresh.head.weight = fresh.embed.weight
    settings = OffloadSettings(preset="low_memory", device_budget=60_000, reserve=1)
    with attach(fresh, settings, tmp_path, backend=FakeBackend()) as session:
        assert session.plan.mode == "stream"
        assert torch.equal(run(fresh), expected)


def test_settings_come_from_the_environment_when_none_are_given(net, monkeypatch):
    monkeypatch.setenv("DDO_PRESET", "off")
    with attach(net, device="cpu") as session:
        assert session.plan.mode == "off"
    monkeypatch.setenv("DDO_PRESET", "fast")
    with pytest.raises(SettingsError, match="preset is 'fast'"):
        attach(net, device="cpu")


@pytest.fixture
def quantized(net):
    data = net.layers[0].up.weight.detach().as_subclass(Quantized)
    net.layers[0].up.weight = nn.Parameter(data, requires_grad=False)
    return net


@pytest.mark.parametrize("preset", ["auto", "group"])
def test_a_module_that_cannot_be_owned_takes_the_group_route_and_says_why(quantized, preset):
    before = photograph(quantized)
    expected = run(quantized)
    with attach(quantized, OffloadSettings(preset=preset), backend=FakeBackend()) as session:
        assert session.plan.mode == "group"
        assert torch.equal(run(quantized), expected)
        assert session.plan.notes[0] == (
            "weight of layers.0.up (Linear) is a tests.Quantized, more than its bytes"
        )
        fallbacks = [f.what for f in session.report().fallbacks]
        assert fallbacks == (["group"] if preset == "auto" else [])
    assert_same(before, photograph(quantized))


def test_a_module_that_cannot_be_owned_may_be_resident(quantized):
    expected = run(quantized)
    settings = OffloadSettings(preset="resident")
    with attach(quantized, settings, backend=FakeBackend()) as session:
        assert session.plan.mode == "resident"
        assert torch.equal(run(quantized), expected)


def test_group_may_be_asked_for_and_is_undone(net):
    before = photograph(net)
    expected = run(net)
    with attach(net, OffloadSettings(preset="group"), backend=FakeBackend()) as session:
        assert session.plan.mode == "group"
        assert photograph(net)["hooks"] != before["hooks"]
        assert torch.equal(run(net), expected)
    assert_same(before, photograph(net))


def test_hooks_of_another_offloader_are_refused(net):
    net.layers[1]._hf_hook = object()
    with pytest.raises(NotOwnable, match=r"layers\.1 \(Layer\) has hooks of another offloader"):
        attach(net, OffloadSettings(), backend=FakeBackend())


def test_a_cuda_device_is_refused_where_there_is_none(net):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    before = photograph(net)
    with pytest.raises(DeviceError, match="no CUDA device is usable, cuda was asked for"):
        attach(net, OffloadSettings(device_budget="1GiB"), device="cuda")
    with pytest.raises(DeviceError, match="weights stream to cuda devices, not to meta"):
        attach(net, OffloadSettings(device_budget="1GiB"), device="meta")
    assert_same(before, photograph(net))


@pytest.mark.parametrize(
    ("variable", "text", "is_named"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128, Expandable_Segments : true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_a_setting_of_torchs_allocator_that_takes_the_limit_away_is_named(variable, text, is_named):
    reason = why_no_pool({variable: text})
    assert (reason is not None) == is_named
    if reason:
        assert variable in reason
        assert repr(text) in reason

"""On a real device: whatever the timing of copies and computation, the results stay the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ddo.lifecycle import OffloadSession
from ddo.settings import OffloadSettings
from tests.ddo.modules import make_net
from tests.ddo.test_gpu_sessions import MIB
from tests.ddo.test_gpu_sessions import backend as backend  # noqa: PLC0414 - the fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
OPTIONS = {"dtype": torch.bfloat16, "width": 1024, "depth": 8}  # 12 MiB a layer
NUM_SEEDS, NUM_STEPS = 20, 4
LONGEST_DELAY = 2_000_000  # clock ticks, about a millisecond


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path, **OPTIONS)


@pytest.fixture
def resident(tmp_path_factory):
    return make_net(tmp_path_factory.mktemp("resident"), **OPTIONS).to("cuda")


def delay_copies(backend, monkeypatch, seed):
    """Let the copy stream sleep before some of the copies, for a random time."""
    chance = random.Random(seed)
    stream = backend._copy_stream
    if not isinstance(stream, torch.cuda.Stream):
        stream = torch.cuda.ExternalStream(stream.handle, device=backend.device)
    submit = backend.submit

    def late_submit(prepared, after, ready):
        if chance.random() < 0.5:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
        submit(prepared, after, ready)

    monkeypatch.setattr(backend, "submit", late_submit)
    return chance


def denoise(net, seed, *, chance=None, then=None):
    """A few steps, each of which depends on the one before."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(0, 11, (2, 4), device="cuda", generator=generator)
    results = []
    with torch.no_grad():
        for step in range(NUM_STEPS):
            if chance is not None and chance.random() < 0.5:
                torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
            result = net(ids)
            ids = result.argmax(-1)
            results.append(result)
            if then is not None:
                then(step)
    return torch.stack(results)


@pytest.mark.parametrize(
    ("preset", "budget"), [("stream", 40), ("stream", 70), ("low_memory", 60), ("auto", 60)]
)
def test_twenty_seeds_are_bit_equal_under_random_delays(
    net, resident, backend, monkeypatch, preset, budget
):
    chance = delay_copies(backend, monkeypatch, seed=budget)
    settings = OffloadSettings(preset=preset, device_budget=budget * MIB + 1, reserve=1)
    with OffloadSession(net, settings, backend) as session:
        for seed in range(NUM_SEEDS):
            found = denoise(net, seed, chance=chance)
            assert torch.equal(found, denoise(resident, seed)), f"seed {seed}"
        assert session.plan.mode == "stream"


def test_seeds_are_bit_equal_while_weights_are_given_back(net, resident, backend, monkeypatch):
    chance = delay_copies(backend, monkeypatch, seed=7)
    settings = OffloadSettings(preset="stream", device_budget=90 * MIB + 1, reserve=1)

    def give_back(step):
        smaller = session.find_smaller(0)
        if step == 1 and smaller is not None:
            session.make_smaller(smaller)

    with OffloadSession(net, settings, backend) as session:
        held = session.plan.device_bytes
        for seed in range(5):
            found = denoise(net, seed, chance=chance, then=give_back)
            assert torch.equal(found, denoise(resident, seed)), f"seed {seed}"
        assert session.plan.device_bytes < held


class NoUploads(TorchDispatchMode):
    """Fails at an operator that takes a tensor in host memory and gives one on the device."""

    is_ours = False  # while the session submits copies of its own, whose bytes it has pinned

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        from_host = any(t.device.type == "cpu" and t.dim() for t in given)
        if from_host and any(t.is_cuda for t in made) and not self.is_ours:
            raise AssertionError(f"{func} brings {[tuple(t.shape) for t in given]} to the device")
        return result


def test_nothing_in_a_step_comes_from_pageable_memory(net, backend, monkeypatch):
    mode, submit = NoUploads(), backend.submit

    def own_submit(*args):
        mode.is_ours = True
        try:
            submit(*args)
        finally:
            mode.is_ours = False

    with pytest.raises(AssertionError, match="to the device"), mode:
        torch.ones(3).to("cuda")
    ids = torch.tensor([[1, 5, 9, 0]], device="cuda")
    monkeypatch.setattr(backend, "submit", own_submit)
    settings = OffloadSettings(preset="stream", device_budget=50 * MIB + 1, reserve=1)
    with OffloadSession(net, settings, backend) as session, torch.no_grad():
        for _ in range(4):
            net(ids)
        before = session.report().copied_bytes
        with mode:
            net(ids)
        assert session.report().copied_bytes > before
        assert session.report().pins["pageable_bytes"] == 0

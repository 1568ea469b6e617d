"""Sessions on a real device, over plain torch and over the native allocator."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ddo.backend import open_backend
from ddo.lifecycle import OffloadSession
from ddo.settings import OffloadSettings
from ddo.torch_backend import TorchBackend
from tests.ddo.modules import IDS, assert_same, make_net, photograph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 1 << 20
WIDTH, DEPTH = 1024, 8  # 12 MiB a layer in bfloat16


@pytest.fixture(params=["torch", "native"])
def backend(request):
    device = torch.device("cuda", 0)
    torch.cuda.init()
    if request.param == "torch":
        return TorchBackend(device, 1 << 30)
    opened = open_backend(device, limit_bytes=1 << 30, host_budget_bytes=1 << 30)
    if opened.fallback_reason is not None:
        pytest.skip(f"no native allocator: {opened.fallback_reason}")
    return opened.backend


@pytest.fixture(params=["torch", "native"])
def make_backend(request):
    """A backend that may pin so much host memory."""
    device = torch.device("cuda", 0)

    def make(host_budget):
        torch.cuda.init()
        if request.param == "torch":
            return TorchBackend(device, host_budget)
        return open_backend(device, limit_bytes=1 << 30, host_budget_bytes=host_budget).backend

    return make


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path, dtype=torch.bfloat16, width=WIDTH, depth=DEPTH)


@pytest.fixture
def expected(net, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resident")  # the files of `net` are mapped: not anew
    resident = make_net(folder, dtype=torch.bfloat16, width=WIDTH, depth=DEPTH).to("cuda")
    with torch.no_grad():
        return resident(IDS.cuda())


def session_of(net, backend, *, budget, preset="stream"):
    settings = OffloadSettings(preset=preset, device_budget=budget + 1, reserve=1)
    return OffloadSession(net, settings, backend)


def run(net):
    with torch.no_grad():
        return net(IDS.cuda())


@pytest.mark.parametrize(
    ("preset", "budget"),
    [("stream", 40), ("stream", 60), ("stream", 90), ("low_memory", 60), ("resident", 200)],
)
def test_results_are_bit_equal_to_those_of_a_resident_module(
    net, expected, backend, preset, budget
):
    before = photograph(net)
    with session_of(net, backend, budget=budget * MIB, preset=preset) as session:
        for _ in range(8):
            assert torch.equal(run(net), expected)
        report = session.report()
        assert report.own_memory_bytes == 0
        assert report.pins["pageable_bytes"] == 0
        assert report.step_clock == "device"
    assert_same(before, photograph(net))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_steady_step_never_waits_for_the_device(net, expected, backend):
    ids = IDS.cuda()
    with session_of(net, backend, budget=50 * MIB), torch.no_grad():
        for _ in range(6):
            net(ids)
        waits = backend.num_host_waits
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [net(ids) for _ in range(4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert backend.num_host_waits == waits
        assert all(torch.equal(result, expected) for result in results)


def test_all_device_memory_and_pins_are_given_back(net, backend):
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    free = backend.free_bytes()
    with session_of(net, backend, budget=60 * MIB):
        run(net)
        assert backend.pins.counters.registered_bytes > 0
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + MIB
    assert backend.free_bytes() >= free - 64 * MIB
    assert backend.pins.counters.registered_bytes == backend.pins.counters.slab_bytes == 0


def test_a_computation_on_another_stream_is_ordered_as_well(net, expected, backend):
    ids, stream = IDS.cuda(), torch.cuda.Stream()
    with session_of(net, backend, budget=50 * MIB), torch.no_grad():
        for k in range(6):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream if k % 2 else torch.cuda.default_stream()):
                result = net(ids)
            torch.cuda.synchronize()
            assert torch.equal(result, expected)


class Peeking(nn.Module):
    """Uses the weight of one layer without calling that layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))
        self.peeked = nn.Linear(1024, 1024)
        self.eval().requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.peeked.weight.t()


def test_a_weight_used_outside_of_its_layer_is_lent_once_and_stays_from_then_on(backend):
    torch.manual_seed(0)
    net = Peeking()
    x = torch.randn(4, 1024, device="cuda")
    with torch.no_grad():
        expected = net.to("cuda")(x)
        net.to("cpu")
        with session_of(net, backend, budget=16 * MIB, preset="low_memory") as session:
            for _ in range(4):
                assert torch.equal(net(x), expected)
            stays = {b["name"]: b["reason"] for b in session.report().plan["blocks"]}
            assert stays["peeked"] == "used outside of its own module's forward"
            assert [f.count for f in session.report().fallbacks if f.what == "stays"] == [1]


class Greedy(nn.Module):
    """Takes a stretch of device memory in the middle of a step."""

    def __init__(self, nbytes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(24))
        self.nbytes = nbytes
        self.eval().requires_grad_(False)

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 12:
                x = x + torch.zeros(self.nbytes, dtype=torch.uint8, device="cuda")[0]
        return x


def test_a_step_that_runs_out_of_device_memory_is_repeated_with_fewer_residents():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    cap = torch.cuda.memory_reserved() + 256 * MIB
    if free < cap:
        pytest.skip(f"only {free} bytes of device memory are free")
    torch.manual_seed(0)
    net = Greedy(180 * MIB)
    x = torch.randn(4, 1024, device="cuda")
    with torch.no_grad():
        expected = net.to("cuda")(x)
        net.to("cpu")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(cap / total)
        try:
            backend = TorchBackend(torch.device("cuda", 0), 1 << 30)
            with session_of(net, backend, budget=96 * MIB, preset="auto") as session:
                for _ in range(3):
                    assert torch.equal(net(x), expected)
                assert session.report().num_repeated >= 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("host_budget", [0, 1, 24, 48, 128])
def test_results_are_bit_equal_by_every_host_tier(net, expected, make_backend, host_budget):
    """Weights of 100 MiB of which the host may pin a part: the rest goes through reader threads."""
    before = photograph(net)
    backend = make_backend(host_budget * MIB)
    with session_of(net, backend, budget=40 * MIB) as session:
        for _ in range(8):
            assert torch.equal(run(net), expected)
        pins = session.report().pins
        assert pins["registered_bytes"] + pins["ring_bytes"] <= host_budget * MIB
        assert (pins["staged_bytes"] > 0) == (0 < host_budget < 128)  # 128 MiB hold everything
        assert (pins["pageable_bytes"] > 0) == (host_budget == 0)
    assert_same(before, photograph(net))

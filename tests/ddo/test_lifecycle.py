from __future__ import annotations

import gc
import math
import random
import threading
import warnings

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ddo import changes
from ddo.blocks import NotOwnable, take_inventory
from ddo.claims import SessionError
from ddo.lifecycle import OffloadSession, SessionState, blocks_of
from ddo.planning import PlanError
from ddo.settings import OffloadSettings
from ddo.stream import GradientError
from tests.ddo.fake_backend import FakeBackend, is_view
from tests.ddo.modules import IDS, assert_same, make_net, photograph, run


def session_of(net, backend=None, *, budget=16_000, **options):
    """A session whose weights may take `budget` bytes."""
    options = {"device_budget": budget + 1, "reserve": 1, "link_rate": "1GB"} | options
    return OffloadSession(net, OffloadSettings(**options), backend or FakeBackend())


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path)


@pytest.mark.parametrize("seed", range(25))
def test_results_are_bit_equal_for_every_budget_and_timing(net, seed):
    """Invariants 1 to 6."""
    draw = random.Random(seed)
    expected = run(net)
    backend = FakeBackend(seed, needs_pins=True)
    budget = draw.randint(12_000, 60_000)
    with session_of(net, backend, budget=budget) as session, backend.reading():
        for _ in range(4):
            assert torch.equal(run(net), expected)
        assert session.plan.device_bytes <= budget
        waits, allocations = backend.num_host_waits, backend.num_allocated
        for _ in range(2):
            assert torch.equal(run(net), expected)
        assert backend.num_host_waits == waits, "the host waits in the steady state"
        assert backend.num_allocated == allocations, "device memory is allocated in every step"


@pytest.mark.parametrize("preset", ["auto", "resident", "stream", "low_memory"])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_results_are_bit_equal_for_every_preset(tmp_path, preset, is_mapped):
    net = make_net(tmp_path if is_mapped else None, dtype=torch.bfloat16)
    expected = run(net)
    before = photograph(net)
    budget = 100_000 if preset == "resident" else 14_000
    backend = FakeBackend(1)
    with session_of(net, backend, budget=budget, preset=preset), backend.reading():
        for _ in range(3):
            assert torch.equal(run(net), expected)
    assert_same(before, photograph(net))
    assert backend.allocated_bytes() == 0
    assert backend.is_closed


def test_detach_leaves_the_module_as_it_was_found(net):
    """Invariant 9."""
    before = photograph(net)
    session = session_of(net).attach()
    run(net)
    assert photograph(net)["hooks"] != before["hooks"]
    session.detach()
    session.detach()
    assert session.state is SessionState.DETACHED
    assert_same(before, photograph(net))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_a_layer_leaves_no_trace(net, error):
    before = photograph(net)
    expected = run(net)

    def interrupt(*_):
        raise error

    with session_of(net, preset="low_memory", budget=8_000) as session:
        run(net)
        handle = net.layers[2].up.register_forward_hook(interrupt)
        with pytest.raises(error):
            run(net)
        handle.remove()
        assert torch.equal(run(net), expected)
        handle = net.layers[3].down.register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            run(net)
        handle.remove()
        assert torch.equal(run(net), expected)
        assert session.report().ring["num_spilled"] == 0, "a layer never gave its place back"
        session.detach()
    assert_same(before, photograph(net))


def test_an_error_inside_the_block_detaches_and_is_passed_on(net):
    before = photograph(net)
    with pytest.raises(ZeroDivisionError), session_of(net):
        run(net)
        raise ZeroDivisionError
    assert_same(before, photograph(net))


@pytest.mark.parametrize("call", ["allocate", "submit", "record", "pin", "wait"])
def test_a_failure_at_any_call_of_the_device_while_attaching_is_rolled_back(net, call):
    before = photograph(net)
    for count in range(40):
        backend = FakeBackend()
        backend.fail_at[call] = count
        session = session_of(net, backend)
        try:
            session.attach()
        except RuntimeError as error:
            assert "injected" in str(error)
        else:
            backend.fail_at.clear()
            session.detach()
            return
        assert session.state is SessionState.DETACHED
        assert backend.allocated_bytes() == 0
        assert backend.is_closed
        assert_same(before, photograph(net))
    raise AssertionError("attaching needs more than 40 calls")


def test_attaching_twice_is_refused_and_harms_nothing(net):
    expected = run(net)
    with session_of(net):
        with pytest.raises(SessionError, match="is attached already; detach its session first"):
            session_of(net).attach()
        with pytest.raises(SessionError, match="is attached already"):
            session_of(net.layers[0]).attach()
        assert torch.equal(run(net), expected)
    with session_of(net):
        assert torch.equal(run(net), expected)


def test_a_session_is_not_attached_again(net):
    session = session_of(net).attach()
    session.detach()
    with pytest.raises(SessionError, match="is detached, expected new"):
        session.attach()


def test_a_budget_that_is_too_small_names_the_need(net):
    before = photograph(net)
    with pytest.raises(PlanError, match=r"weights need at least [\d.]+ KiB of the device"):
        session_of(net, budget=3000).attach()
    assert_same(before, photograph(net))


def test_the_order_of_use_is_learned_at_the_step_boundary(net):
    """The head is defined first and used last, under a weight that the embedding shares."""
    with session_of(net, preset="low_memory", budget=20_000) as session:
        for _ in range(3):
            run(net)
        report = session.report()
        assert report.num_replans == {"order of use": 1}
        missed = report.ring["num_missed"]
        for _ in range(3):
            run(net)
        assert session.report().ring["num_missed"] == missed


class Moody(nn.Module):
    """Layers in an order that the caller chooses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.requires_grad_(False)

    def forward(self, x, order):
        for k in order:
            x = torch.tanh(self.layers[k](x))
        return x


@pytest.mark.parametrize("seed", range(10))
def test_skipped_repeated_and_reordered_layers_get_their_own_weights(seed):
    draw = random.Random(seed)
    net, x = Moody(), torch.randn(2, 16)
    orders = [draw.choices(range(8), k=draw.randint(1, 12)) for _ in range(12)]
    expected = [net(x, order) for order in orders]
    backend = FakeBackend(seed)
    with session_of(net, backend, budget=4000) as session, backend.reading():
        for order, right in zip(orders, expected, strict=True):
            assert torch.equal(net(x, order), right)
        assert session.report().ring["num_reordered"] > 0


def test_two_threads_may_run_steps_at_once(net):
    expected = run(net)
    failures = []
    backend = FakeBackend(5)

    def work():
        for _ in range(10):
            if not torch.equal(run(net), expected):
                failures.append("other result")

    with session_of(net, backend) as session:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.report().num_steps >= 1
    assert not failures


class Adapted(nn.Module):
    """What an adapter library does to a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


@pytest.mark.parametrize("hurry_s", [0.0, math.inf], ids=["idle", "hurried"])
def test_adapters_may_come_and_go_while_attached(net, monkeypatch, hurry_s):
    monkeypatch.setattr(changes, "HURRY_S", hurry_s)
    plain = run(net)
    before = photograph(net)
    backend = FakeBackend(2)
    with session_of(net, backend) as session, backend.reading():
        assert torch.equal(run(net), plain)
        base = net.layers[1].up
        adapted = Adapted(base).requires_grad_(False)
        net.layers[1].up = adapted
        with_adapter = run(net)
        assert not torch.equal(with_adapter, plain)
        assert torch.equal(run(net), with_adapter)
        assert session.report().num_replans["module changed"] == 1
        adapted.b.weight.data = torch.zeros_like(adapted.b.weight)
        assert torch.equal(run(net), plain)
        net.layers[1].up = base
        assert torch.equal(run(net), plain)
    assert_same(before, photograph(net))


class NotMovedYet(nn.Linear):
    """A layer that came while others are on a device: its first step fails."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().forward(x)


def test_a_step_that_fails_because_a_layer_was_replaced_is_run_again(net, monkeypatch):
    monkeypatch.setattr(changes, "HURRY_S", math.inf)
    with session_of(net) as session:
        plain = run(net)
        old = net.layers[1].up
        new = NotMovedYet(old.in_features, old.out_features, bias=old.bias is not None)
        new.load_state_dict(old.state_dict())
        net.layers[1].up = new.requires_grad_(False)
        assert torch.equal(run(net), plain)
        assert session.report().num_replans["module changed"] == 1
        new.num_calls = 0
        with pytest.raises(RuntimeError, match="same device"):  # nothing has changed this time
            run(net)
        assert torch.equal(run(net), plain)


@pytest.mark.parametrize("hurry_s", [0.0, math.inf], ids=["idle", "hurried"])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_weight_that_is_rewritten_between_steps_is_used_as_it_is_now(
    tmp_path, monkeypatch, is_mapped, hurry_s
):
    monkeypatch.setattr(changes, "HURRY_S", hurry_s)
    net = make_net(tmp_path if is_mapped else None)
    with session_of(net, preset="low_memory") as session:
        plain = run(net)
        with torch.no_grad():
            net.layers[4].up.weight.data += 1
        changed = run(net)
        assert not torch.equal(changed, plain)
        assert torch.equal(run(net), changed)
        assert session.report().num_steps == 3
        session.detach()
        assert torch.equal(run(net), changed)


def test_weights_that_were_written_to_before_attaching_are_not_read_from_the_file(net):
    with torch.no_grad():
        net.layers[0].up.weight.data.mul_(2)
    expected = run(net)
    with session_of(net) as session:
        assert torch.equal(run(net), expected)
        assert session.report().own_memory_bytes >= net.layers[0].up.weight.nbytes


def test_weights_that_require_gradients_are_not_streamed_into_a_backward_pass(net):
    net.layers[0].up.weight.requires_grad_(True)
    with session_of(net, preset="low_memory"):
        run(net)
        with pytest.raises(GradientError, match=r"call the module under torch\.no_grad"):
            net(IDS)


def test_a_buffer_that_a_layer_updates_keeps_its_value(net):
    with session_of(net):
        run(net)
        net.mean.add_(1)
    assert torch.equal(net.mean, torch.full((16,), 1.25))


class Hungry(FakeBackend):
    """A device that runs out of memory while a layer computes, a number of times."""

    def __init__(self, times):
        super().__init__(0)
        self.times = times

    def starve(self, *_):
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("the device is full")


def test_a_step_that_runs_out_of_memory_gives_weights_back_and_is_repeated(net):
    expected = run(net)
    backend = Hungry(times=2)
    with session_of(net, backend, budget=24_000) as session:
        held = session.plan.device_bytes
        handle = net.layers[3].register_forward_hook(backend.starve)
        assert torch.equal(run(net), expected)
        handle.remove()
        assert session.plan.device_bytes < held
        report = session.report()
        assert report.num_repeated == 2
        assert any(f.what == "memory" for f in report.fallbacks)


def test_memory_that_was_given_back_is_taken_again_when_no_step_wants_it(net):
    expected = run(net)
    backend = Hungry(times=1)
    with session_of(net, backend, budget=24_000) as session:
        run(net)
        held = session.plan.device_bytes
        handle = net.layers[3].register_forward_hook(backend.starve)
        run(net)
        handle.remove()
        smaller = session.plan.device_bytes
        for _ in range(20):
            assert torch.equal(run(net), expected)
        assert smaller < session.plan.device_bytes <= held
        assert session.report().num_replans["memory was left"] == 1


def test_a_resident_module_pins_no_host_memory(net):
    backend = CountsPins()
    with session_of(net, backend, budget=90_000) as session:
        assert session.plan.mode == "resident"
        assert backend.num_pinned == 0
    with session_of(net, backend, budget=16_000):
        assert backend.num_pinned > 0


class CountsPins(FakeBackend):
    """Counts what is pinned at the moment."""

    num_pinned = 0

    def pin(self, memories):
        super().pin(memories)
        self.num_pinned += len(memories)

    def close(self):
        super().close()
        self.num_pinned = 0


def test_a_resident_module_streams_when_a_step_wants_its_memory(net):
    expected = run(net)
    backend = Hungry(times=3)
    with session_of(net, backend, budget=60_000) as session:
        assert session.plan.mode == "resident"
        handle = net.layers[3].register_forward_hook(backend.starve)
        for _ in range(3):
            assert torch.equal(run(net), expected)
        handle.remove()
        assert session.plan.mode == "stream"


def test_a_step_that_never_fits_fails_with_a_remedy_and_the_module_stays_usable(net):
    before = photograph(net)
    expected = run(net)
    backend = Hungry(times=10**6)
    with session_of(net, backend) as session:
        handle = net.layers[3].register_forward_hook(backend.starve)
        with pytest.raises(torch.OutOfMemoryError) as error:
            run(net)
        assert any("lower device_budget" in note for note in error.value.__notes__)
        handle.remove()
        assert torch.equal(run(net), expected)
        session.detach()
    assert_same(before, photograph(net))


class Quantized(torch.Tensor):
    """A tensor that is more than its bytes."""


def test_a_weight_that_is_more_than_its_bytes_is_refused_with_its_name(net):
    data = torch.zeros(48, 16).as_subclass(Quantized)
    net.layers[0].up.weight = nn.Parameter(data, requires_grad=False)
    with pytest.raises(NotOwnable, match=r"weight of layers\.0\.up \(Linear\)"):
        session_of(net).attach()


def test_the_report_says_what_was_planned_and_done(net):
    with session_of(net, budget=20_000) as session:
        for _ in range(5):
            run(net)
        report = session.report()
        blocks = blocks_of(session)
    assert report.num_steps == 5
    assert report.plan["mode"] == "stream"
    names = {b["name"] for b in report.plan["blocks"] if b["placement"] == "ring"}
    blocks = [block for block in blocks if block.name in names]
    assert report.copied_bytes_per_step == sum(m.found.nbytes for b in blocks for m in b.members)
    assert report.copied_bytes_per_step > 0
    assert report.step_clock == "host"
    assert report.step_s > 0
    assert report.own_memory_bytes == 0
    assert report.to_json()["schema"] == 1


def test_the_first_weight_tells_where_the_module_computes(net):
    with session_of(net) as session:
        first = next(net.parameters())
        assert first.data_ptr() != 0
        assert first.device == session.device


def test_moving_or_casting_an_attached_module_is_refused(net):
    expected = run(net)
    with session_of(net):
        assert net.to("cpu") is net
        for change in (lambda: net.to("meta"), net.half, lambda: nn.Sequential(net).double()):
            with pytest.raises(SessionError, match="is attached on cpu, its weights cannot be"):
                change()
        assert torch.equal(run(net), expected)
    net.half()


def test_adapters_that_come_in_inference_mode_leave_no_inference_tensor(net):
    backend = FakeBackend(1)
    with session_of(net, backend), torch.inference_mode():
        net(IDS)
        with torch.inference_mode(False):
            net.layers[1].up = Adapted(net.layers[1].up).requires_grad_(False)
        net(IDS)
        tensors = [*net.parameters(), *net.buffers()]
    assert not any(tensor.is_inference() for tensor in tensors)


def test_steps_may_run_in_inference_mode(net):
    expected = run(net)
    backend = Hungry(times=1)
    before = photograph(net)
    with session_of(net, backend, budget=20_000) as session, torch.inference_mode():
        handle = net.layers[3].register_forward_hook(backend.starve)
        for _ in range(4):
            assert torch.equal(net(IDS), expected)
        handle.remove()
        assert session.report().num_repeated == 1
    assert_same(before, photograph(net))
    assert not any(parameter.is_inference() for parameter in net.parameters())


def test_hooks_that_compute_weights_come_after_the_weights(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.layers[2].down)
    net.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(net.layers[3].up)
    net.requires_grad_(False)
    expected = run(net)
    with session_of(net, preset="low_memory", budget=20_000) as session:
        for _ in range(2):
            assert torch.equal(run(net), expected)
        with HostReads(blocks_of(session)) as reads:
            assert torch.equal(run(net), expected)
        assert reads.found == []


def test_a_layer_that_fails_outside_of_a_step_gives_its_place_back(net):
    expected = run(net)

    def fail(*_):
        raise ValueError("broken")

    with session_of(net, preset="low_memory", budget=8_000) as session:
        run(net)
        handle = net.layers[2].up.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="broken"):
            net.layers[2].up(torch.zeros(1, 16))
        handle.remove()
        for _ in range(2):
            assert torch.equal(run(net), expected)
        assert session.report().ring["num_spilled"] == 0


def test_data_that_is_given_to_a_streamed_weight_between_steps_is_used(net):
    with session_of(net, preset="low_memory", budget=8_000) as session:
        run(net)
        data = torch.zeros_like(net.layers[2].up.weight)
        net.layers[2].up.weight.data = data
        changed = run(net)
        assert torch.equal(run(net), changed)
        assert session.report().num_replans["module changed"] == 1
        session.detach()
        assert net.layers[2].up.weight.data_ptr() == data.data_ptr()
        assert torch.equal(run(net), changed)


class HostReads(TorchDispatchMode):
    """Collects the operators that compute with host memory of streamed weights."""

    def __init__(self, blocks):
        super().__init__()
        self.spans = [
            (m.found.data_ptr(), m.found.data_ptr() + m.found.nbytes)
            for block in blocks
            for m in block.members
        ]
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_transfer = func is torch.ops.aten.copy_.default  # by the device itself
        if not is_view(func) and not is_transfer:
            for value in tree_iter((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    address = value.data_ptr()
                    if any(low <= address < high for low, high in self.spans):
                        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["stream", "low_memory", "resident"])
def test_no_operator_computes_with_a_weight_in_host_memory(net, preset):
    """Invariant 7."""
    budget = 90_000 if preset == "resident" else 16_000
    with session_of(net, preset=preset, budget=budget) as session:
        run(net)
        with HostReads(blocks_of(session)) as reads:
            run(net)
            run(net)
        assert reads.found == []
    with HostReads(blocks_before(net)) as reads:
        run(net)
    assert reads.found, "the watch sees nothing at all"


def blocks_before(net):
    return take_inventory(net, torch.device("cpu")).blocks


def test_a_session_that_is_dropped_unpins_its_pages(tmp_path):
    net = make_net(tmp_path)
    backend = FakeBackend()
    session = session_of(net, backend).attach()
    del session, net
    gc.collect()
    assert backend.is_closed


class Programs(RuleBasedStateMachine):
    """Attach, run, break, adapt and detach in any order: results and module stay what they were."""

    width = 16

    def __init__(self):
        super().__init__()
        self.net = make_net(seed=3, depth=3, width=self.width)
        self.expected = run(self.net)
        self.before = photograph(self.net)
        self.session = None

    def make_backend(self, seed):
        return FakeBackend(seed, needs_pins=True)

    @precondition(lambda self: self.session is None)
    @rule(
        seed=st.integers(0, 99),
        budget=st.integers(9_000, 45_000),
        preset=st.sampled_from(["auto", "stream", "low_memory"]),
    )
    def attach(self, seed, budget, preset):
        backend = self.make_backend(seed)
        scaled = budget * (self.width // 16) ** 2
        self.session = session_of(self.net, backend, budget=scaled, preset=preset)
        try:
            self.session.attach()
        except PlanError:
            self.session = None

    @rule()
    def run(self):
        assert torch.equal(run(self.net), self.expected)

    @rule(layer=st.integers(0, 2), name=st.sampled_from(["norm", "up", "down"]))
    def break_off(self, layer, name):
        def fail(*_):
            raise KeyboardInterrupt

        handle = getattr(self.net.layers[layer], name).register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(self.net)
        handle.remove()

    @rule(layer=st.integers(0, 2))
    def adapt_and_undo(self, layer):
        base = self.net.layers[layer].up
        self.net.layers[layer].up = Adapted(base).eval().requires_grad_(False)
        run(self.net)
        self.net.layers[layer].up = base

    @rule(layer=st.integers(0, 2))
    def call_one_layer_alone(self, layer):
        with torch.no_grad():
            self.net.layers[layer](torch.zeros(1, self.width))

    @precondition(lambda self: self.session is not None)
    @rule()
    def detach(self):
        self.session.detach()
        self.session = None

    @invariant()
    def a_detached_module_is_as_it_was_found(self):
        if self.session is None:
            assert_same(self.before, photograph(self.net))

    def teardown(self):
        if self.session is not None:
            self.session.detach()
        assert_same(self.before, photograph(self.net))


Programs.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestPrograms = Programs.TestCase

"""Compiled blocks stream as one each, with nothing of ours inside of the compiled code."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from ddo.attaching import attach
from ddo.blocks import take_inventory
from ddo.lifecycle import OffloadSession, blocks_of
from ddo.owning import NotOwnable
from ddo.settings import OffloadSettings
from tests.ddo import flux, quantized
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.modules import IDS, assert_same, load_net, make_net, photograph, run
from tests.ddo.test_lifecycle import Adapted

LONG_IDS = torch.tensor([[1, 5, 9, 0, 7], [3, 3, 10, 2, 2]])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def net(tmp_path):
    return make_net(tmp_path)


def compile_blocks(net, *, by="method"):
    """Each layer compiled by itself, without a graph break."""
    for k, layer in enumerate(net.layers):
        if by == "method":
            layer.compile(backend="eager", fullgraph=True)
        else:
            net.layers[k] = torch.compile(layer, backend="eager", fullgraph=True)
    return net


def session_of(net, backend=None, *, budget=30_000, preset="stream"):
    settings = OffloadSettings(preset=preset, device_budget=budget + 1, reserve=1, link_rate="1GB")
    return OffloadSession(net, settings, backend or FakeBackend(1))


def streamed(session):
    return {block.name for block in session.plan.blocks if block.placement == "ring"}


@pytest.mark.parametrize("preset", ["stream", "low_memory"])
@pytest.mark.parametrize("by", ["method", "function"])
def test_compiled_blocks_stream_and_are_compiled_once(net, by, preset):
    compile_blocks(net, by=by)
    expected = run(net)
    before = photograph(net)
    torch._dynamo.reset()
    backend = FakeBackend(2, needs_pins=True)
    with session_of(net, backend, preset=preset) as session:
        assert torch.equal(run(net), expected)
        first = session.report().compiled
        assert first["num_graphs"] >= 1
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(5):
                assert torch.equal(run(net), expected)
        assert session.report().compiled == first
        assert first["num_graph_breaks"] == 0
        assert any(name.startswith("layers.") for name in streamed(session))
        assert "layers.1" in {block.name for block in blocks_of(session)}
    assert_same(before, photograph(net))
    assert torch.equal(run(net), expected)


def test_compiled_blocks_that_are_lowered_stream_with_equal_results(tmp_path):
    """The same through AOTAutograd, which looks at how the weights lie in memory."""
    net = make_net(tmp_path, dtype=torch.bfloat16)
    for layer in net.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    expected = run(net)
    with session_of(net, budget=15_000) as session:
        with torch.inference_mode():
            assert torch.equal(net(IDS), expected)
            with torch._dynamo.config.patch(error_on_recompile=True):
                for _ in range(3):
                    assert torch.equal(net(IDS), expected)
        assert session.report().ring["num_copies"] > 0


def test_blocks_that_are_compiled_after_attaching_stream_from_the_next_step_on(net):
    expected = run(net)
    with session_of(net, preset="low_memory") as session:
        assert torch.equal(run(net), expected)
        compile_blocks(net)
        compiled = vars(net.layers[2])["_compiled_call_impl"]
        for _ in range(3):
            assert torch.equal(run(net), expected)
        assert session.report().num_replans["module changed"] == 1
        assert session.report().compiled["num_graph_breaks"] == 0
        assert "layers.2" in streamed(session)
        net.layers[3]._compiled_call_impl = None
        assert torch.equal(run(net), expected)
        assert "layers.3.up" in streamed(session)
    assert vars(net.layers[2])["_compiled_call_impl"] is compiled
    assert net.layers[3]._compiled_call_impl is None
    assert torch.equal(run(net), expected)


def test_another_size_is_compiled_once_more_and_counted(net):
    for layer in net.layers:
        layer.compile(backend="eager", fullgraph=True, dynamic=False)
    with session_of(net) as session:
        run(net)
        first = session.report().compiled
        expected = run(net, LONG_IDS)
        second = session.report().compiled
        assert second["num_recompiles"] == first["num_recompiles"] + 1
        for _ in range(3):
            assert torch.equal(run(net, LONG_IDS), expected)
            run(net)
        assert session.report().compiled == second
    assert torch.equal(run(net, LONG_IDS), expected)


def test_an_error_in_compiled_code_leaves_no_trace(net):
    compile_blocks(net)
    expected, before = run(net), photograph(net)
    with session_of(net, preset="low_memory") as session:
        run(net)
        with pytest.raises(RuntimeError, match="shape"):
            net.layers[2](torch.zeros(1, 15))
        assert torch.equal(run(net), expected)
        assert session.report().ring["num_spilled"] == 0
    assert_same(before, photograph(net))


@pytest.mark.parametrize("by", ["method", "function"])
def test_a_module_compiled_as_a_whole_is_refused_with_what_to_do_or_resident(net, by):
    if by == "method":
        net.compile(backend="eager")
    module = net if by == "method" else torch.compile(net, backend="eager")
    expected = run(module)
    reason = r"the module \(\w+\) is compiled as a whole, .*; compile its blocks instead"
    with pytest.raises(NotOwnable, match=reason):
        attach(module, OffloadSettings(), backend=FakeBackend())
    with attach(module, OffloadSettings(preset="resident"), backend=FakeBackend()) as session:
        assert session.plan.mode == "resident"
        assert torch.equal(run(module), expected)


def test_code_compiled_around_an_attached_module_runs_it_uncompiled_and_says_so(net):
    expected = run(net)
    with session_of(net) as session:
        whole = torch.compile(net, backend="eager")
        for _ in range(3):
            assert torch.equal(run(whole), expected)
        said = [f.reason for f in session.report().fallbacks if f.what == "compile"]
        assert said == [
            "code compiled around it ran uncompiled: the module is attached: compile its blocks by "
            "block.compile(), not the whole"
        ]
        torch._dynamo.reset()
        strict = torch.compile(net, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile its blocks by block"):
            run(strict)
    assert torch.equal(run(net), expected)


def test_weights_in_a_compiled_block_may_be_tied_to_others(net):
    net.layers[5].up.weight = net.layers[1].up.weight
    compile_blocks(net)
    expected, before = run(net), photograph(net)
    with session_of(net, preset="low_memory"):
        for _ in range(3):
            assert torch.equal(run(net), expected)
    assert_same(before, photograph(net))


@pytest.mark.parametrize("kind", ["torchao int8", "torchao float8"])
def test_compiled_blocks_of_quantized_weights_stream_without_recompiling(kind):
    tower, x = quantized.make_tower(kind), quantized.make_input()
    for layer in tower.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    expected = quantized.run(tower, x)
    total = sum(block.nbytes for block in take_inventory(tower, torch.device("cpu")).blocks)
    with session_of(tower, budget=int(0.7 * total), preset="low_memory") as session:
        assert torch.equal(quantized.run(tower, x), expected)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                assert torch.equal(quantized.run(tower, x), expected)
        assert "layers.2" in streamed(session)
    assert torch.equal(quantized.run(tower, x), expected)


def test_an_adapter_that_comes_while_blocks_are_compiled_is_compiled_in(net, tmp_path):
    plain = run(net)
    resident = load_net(tmp_path)
    for each in (net, resident):
        compile_blocks(each)

    def adapt(module):
        torch.manual_seed(0)
        module.layers[2].up = Adapted(module.layers[2].up).requires_grad_(False)

    adapt(resident)
    wanted = run(resident)
    with session_of(net) as session:
        assert torch.equal(run(net), plain)
        adapt(net)
        for _ in range(2):
            assert torch.equal(run(net), wanted)
        assert session.report().num_replans["module changed"] == 1
        assert session.report().compiled["num_graph_breaks"] == 0


def test_blocks_that_diffusers_compiles_stream_without_a_graph_break():
    """Regional compilation: one graph for each kind of block, whatever their number."""
    transformer = flux.make_transformer()
    transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    expected = flux.run(transformer)
    with session_of(transformer, budget=200_000, preset="low_memory") as session:
        assert torch.equal(flux.run(transformer), expected)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                assert torch.equal(flux.run(transformer), expected)
        assert session.report().compiled["num_graph_breaks"] == 0
        blocks = {block.name for block in session.plan.blocks}
        assert {"transformer_blocks.0", "single_transformer_blocks.1"} <= blocks
        assert any("transformer_blocks" in name for name in streamed(session))
    assert torch.equal(flux.run(transformer), expected)

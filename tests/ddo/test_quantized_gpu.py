"""Quantized modules and compiled blocks on a real device, over plain torch and native."""

from __future__ import annotations

import copy

import pytest
import torch

from ddo.attaching import attach
from ddo.blocks import take_inventory
from ddo.lifecycle import OffloadSession
from ddo.owning import NotOwnable
from ddo.settings import OffloadSettings
from ddo.strays import StrayFinder
from tests.ddo import flux, quantized
from tests.ddo.modules import assert_same, photograph
from tests.ddo.test_gpu_sessions import backend as backend  # noqa: PLC0414 - the fixture
from tests.ddo.test_quantized import parts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDTH = 1024
CPU = torch.device("cpu")
# Of quanto's int4 the CPU's packing is refused, see below. Its float8 may take another kernel
# when quanto itself moves it, so that it is compared with a resident session.
KINDS = [kind for kind in quantized.PORTABLE if kind != "quanto int4"]


def session_of(tower, backend, *, share=0.6, preset="stream"):
    total = sum(block.nbytes for block in take_inventory(tower, CPU).blocks)
    settings = OffloadSettings(preset=preset, device_budget=int(share * total) + 1, reserve=1)
    return OffloadSession(tower, settings, backend)


def by_a_resident_session(tower, x):
    with attach(tower, OffloadSettings(preset="resident"), device="cuda") as session:
        assert session.plan.mode == "resident"
        return quantized.run(tower, x)


@pytest.mark.parametrize("preset", ["stream", "low_memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_module_streams_with_equal_results_and_is_restored(kind, preset, backend):
    """Invariants 7 and 9."""
    tower = quantized.make_tower(kind, width=WIDTH)
    x = quantized.make_input(WIDTH, "cuda")
    if kind.startswith("quanto"):
        expected = by_a_resident_session(tower, x)
    else:
        expected = quantized.run(copy.deepcopy(tower).to("cuda"), x)
    before, seen = parts_of(tower), []
    share = 0.6 if preset == "stream" else 0.8
    with session_of(tower, backend, share=share, preset=preset) as session:
        for _ in range(4):
            assert torch.equal(quantized.run(tower, x), expected)
        assert session.plan.mode == "stream"
        assert any(b.placement == "ring" for b in session.plan.blocks)
        layer = tower.layers[2].down
        handle = layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.device.type))
        assert torch.equal(quantized.run(tower, x), expected)
        handle.remove()
        assert seen == ["cuda"]
    assert parts_of(tower) == before
    assert all(weight.device.type == "cpu" for weight in tower.parameters())


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int8"])
def test_a_quantized_weight_used_outside_of_its_layer_is_lent(kind):
    tower = quantized.make_tower(kind, width=WIDTH)
    blocks = take_inventory(tower, CPU).blocks
    finder = StrayFinder(enumerate(blocks), torch.device("cuda", 0))
    with torch.no_grad(), finder:
        dense = tower.layers[2].up.weight.dequantize()
    assert dense.is_cuda
    assert [blocks[number].name for number in finder.found] == ["layers.2.up"]


def test_weights_packed_for_the_cpu_are_refused_or_resident_and_given_back():
    tower = quantized.make_tower("quanto int4", width=WIDTH)
    if type(tower.layers[0].up.weight).__name__ != "TinyGemmWeightQBitsTensor":
        pytest.skip("quanto has no packing for this processor")
    before = parts_of(tower)
    x = quantized.make_input(WIDTH, "cuda")
    with pytest.raises(NotOwnable, match="packed for the device that it is on; take preset"):
        attach(tower, OffloadSettings(preset="stream"), device="cuda")
    result = by_a_resident_session(tower, x)
    assert torch.isfinite(result).all()
    assert parts_of(tower) == before


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_blocks_compiled_by_inductor_stream_with_equal_results(mode, backend, monkeypatch):
    """With `reduce-overhead` torch records CUDA graphs at the weights' addresses."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes of its own
    torch._dynamo.reset()
    torch.manual_seed(0)
    tower = quantized.Tower(WIDTH, 6).to(torch.bfloat16).eval().requires_grad_(False)
    x = quantized.make_input(WIDTH, "cuda")
    resident = copy.deepcopy(tower).to("cuda")
    for layer in (*tower.layers, *resident.layers):
        layer.compile(fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        expected = quantized.run(resident, x).clone()
    before = photograph(tower)
    with session_of(tower, backend, preset="low_memory", share=0.8) as session:
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(quantized.run(tower, x), expected)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                assert torch.equal(quantized.run(tower, x), expected)
        assert session.report().compiled["num_graph_breaks"] == 0
        placements = {b.name: b.placement for b in session.plan.blocks}
        assert placements["layers.2"] == "ring"
    assert_same(before, photograph(tower))


def test_adapters_are_fused_while_attached(backend):
    """Weights that stream and weights that stay are on one device while they are fused."""
    pytest.importorskip("peft")
    from tests.ddo import test_adapters as adapters

    def run(transformer):
        inputs = {k: v.cuda() for k, v in flux.inputs().items()}
        with torch.no_grad():
            return transformer(**inputs, return_dict=False)[0]

    fused = flux.make_transformer()
    adapters.add(fused, "first", seed=1)
    fused.fuse_lora()
    expected = run(fused.to("cuda"))
    transformer = flux.make_transformer()
    settings = OffloadSettings(preset="stream", device_budget=200_001, reserve=1, ring=60_000)
    with OffloadSession(transformer, settings, backend):
        run(transformer)
        adapters.add(transformer, "first", seed=1)
        run(transformer)
        transformer.fuse_lora()
        for _ in range(2):
            assert torch.equal(run(transformer), expected)
    assert all(weight.device.type == "cpu" for weight in transformer.parameters())

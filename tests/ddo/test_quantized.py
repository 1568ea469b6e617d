"""Quantized modules keep their own forward while their inner tensors stream."""

from __future__ import annotations

import pytest
import torch

from ddo.attaching import attach
from ddo.blocks import take_inventory
from ddo.claims import SessionError
from ddo.inner import inner_tensors
from ddo.lifecycle import OffloadSession
from ddo.owning import NotOwnable
from ddo.routes import RouteSession
from ddo.settings import OffloadSettings
from ddo.strays import StrayFinder
from ddo.stream import GradientError
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.quantized import KINDS, make_input, make_tower, run

CPU = torch.device("cpu")


def session_of(tower, backend=None, *, share=0.7, preset="stream"):
    """A session whose weights may take a share of their bytes."""
    total = sum(block.nbytes for block in take_inventory(tower, CPU).blocks)
    budget = int(share * total)
    settings = OffloadSettings(preset=preset, device_budget=budget + 1, reserve=1, link_rate="1GB")
    return OffloadSession(tower, settings, backend or FakeBackend())


def bytes_of(tensor):
    return tensor.contiguous().reshape(tensor.shape or (1,)).view(torch.uint8)


def streamed(session):
    return {block.name for block in session.plan.blocks if block.placement == "ring"}


def parts_of(tower):
    """Each weight's class, and where each of its plain tensors lies."""
    return [
        (name, type(weight), id(weight), weight.device, inner.path, tensor.data_ptr(), tensor.dtype)
        for child_name, child in tower.named_modules()
        for name, weight in child._parameters.items()
        if weight is not None
        for inner in inner_tensors(weight, child)
        for tensor in inner.tensors
    ]


@pytest.mark.parametrize("preset", ["stream", "low_memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_module_streams_with_equal_results_and_is_restored(kind, preset):
    """Invariants 2, 3, 8 and 9."""
    tower, x = make_tower(kind), make_input()
    expected = run(tower, x)
    before = parts_of(tower)
    backend = FakeBackend(3, needs_pins=True)
    with session_of(tower, backend, preset=preset) as session, backend.reading():
        for _ in range(4):
            assert torch.equal(run(tower, x), expected)
        assert session.plan.mode == "stream"
        assert any(name.startswith("layers.") for name in streamed(session))
    assert parts_of(tower) == before
    assert torch.equal(run(tower, x), expected)
    assert backend.allocated_bytes() == 0


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_small_tensors_of_a_weight_are_one_copy_together(kind):
    tower = make_tower(kind, width=512)
    blocks = {block.name: block for block in take_inventory(tower, CPU).blocks}
    block = blocks["layers.1.down"]
    names = [member.name.removeprefix("layers.1.down.weight.") for member in block.members]
    assert len(names) >= 3, names
    assert len(block.copies) == 2, "the weight itself, and the rest"
    memory = torch.zeros(block.nbytes, dtype=torch.uint8)
    for copy in block.copies:
        memory[copy.target_offset : copy.target_offset + copy.memory.numel()] = copy.memory
    for member, view in zip(block.members, block.views(memory), strict=True):
        assert view.shape == member.found.shape
        assert torch.equal(bytes_of(view), bytes_of(member.found))


@pytest.mark.parametrize("kind", KINDS)
def test_every_inner_tensor_is_on_the_device_while_its_layer_computes(kind):
    """Invariant 7."""
    tower, x = make_tower(kind), make_input()
    backend = FakeBackend(1)
    seen = []

    def look(layer, _args):
        for inner in inner_tensors(layer.weight, layer):
            for tensor in inner.tensors:
                address = tensor.data_ptr()
                spans = [(a, a + n) for a, n, _ in backend.memories]
                seen.append((inner.path, any(low <= address < high for low, high in spans)))

    with session_of(tower, backend, preset="low_memory"):
        run(tower, x)
        handles = [layer.down.register_forward_pre_hook(look) for layer in tower.layers]
        run(tower, x)
        for handle in handles:
            handle.remove()
    assert len(seen) >= len(tower.layers)
    assert all(is_on_device for _, is_on_device in seen), seen


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int4", "bitsandbytes nf4", "gguf Q8_0"])
def test_a_quantized_module_that_fits_is_resident(kind):
    tower, x = make_tower(kind), make_input()
    expected, before = run(tower, x), parts_of(tower)
    with session_of(tower, share=1.5, preset="auto") as session:
        assert session.plan.mode == "resident"
        assert torch.equal(run(tower, x), expected)
        assert session.report().fallbacks[0].what == "source"  # the weights are in no file
    assert parts_of(tower) == before


@pytest.mark.parametrize("kind", ["quanto int8"])
def test_a_quantized_weight_that_requires_gradients_is_not_streamed_into_a_backward_pass(kind):
    tower, x = make_tower(kind), make_input()
    tower.layers[1].up.weight.requires_grad_(True)
    with session_of(tower, preset="low_memory"):
        run(tower, x)
        with pytest.raises(GradientError, match=r"weights of 'layers\.1\.up' stream but"):
            tower(x)


@pytest.mark.parametrize("kind", ["torchao int8", "quanto float8", "gguf Q4_0"])
def test_a_cast_to_what_a_quantized_module_is_already_changes_nothing(kind):
    tower = make_tower(kind)
    with session_of(tower):
        if kind != "gguf Q4_0":  # there the weights are bytes to everybody
            assert tower.to(torch.bfloat16) is tower
        with pytest.raises(SessionError, match="its weights cannot be changed to torch"):
            tower.float()


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int8"])
def test_a_quantized_weight_used_outside_of_its_layer_is_found(kind):
    tower, x = make_tower(kind), make_input()
    blocks = take_inventory(tower, CPU).blocks
    finder = StrayFinder(enumerate(blocks), CPU)
    weight = tower.layers[2].up.weight
    with torch.no_grad(), finder:
        torch.nn.functional.linear(x, weight)
        weight.dequantize()
    assert [blocks[number].name for number in finder.found] == ["layers.2.up"]


def tinygemm():
    """A tower whose matrices quanto packs for the processor that they are on."""
    tower = make_tower("quanto int4", width=256)
    kinds = {type(layer.up.weight).__name__ for layer in tower.layers}
    if kinds != {"TinyGemmWeightQBitsTensor"}:
        pytest.skip(f"quanto has no packing for this processor, weights are {kinds}")
    return tower


def unquantized():
    bnb = pytest.importorskip("bitsandbytes")
    tower = make_tower("bitsandbytes nf4")
    tower.layers[0].up = bnb.nn.Linear4bit(64, 192, compute_dtype=torch.bfloat16)
    return tower.requires_grad_(False)


def packed_for_the_cpu():
    tower = make_tower("bitsandbytes nf4")
    tower.layers[0].up.weight.quant_state.packing_format_for_cpu = True
    return tower


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tinygemm, r"weight of layers\.0\.up \(QLinear\) is a "
         r"optimum\.quanto\.TinyGemmWeightQBitsTensor, packed for the device that it is on; take "
         r"preset resident"),
        (unquantized, r"layers\.0\.up \(Linear4bit\) is a bitsandbytes\.Params4bit that is not "
         r"quantized yet; move the module to its device and back once"),
        (packed_for_the_cpu, r"is a bitsandbytes\.Params4bit, packed for this CPU by a call here; "
         r"load it again"),
    ],
)  # fmt: skip
def test_what_can_neither_stream_nor_go_by_groups_is_refused_with_library_class_and_remedy(
    make, reason
):
    with pytest.raises(NotOwnable, match=reason):
        attach(make(), OffloadSettings(preset="stream"), backend=FakeBackend())


class Relocating(RouteSession):
    """Moves a module by its own `_apply`, as `to` does."""

    mode = "resident"

    def _begin(self):
        self.module._apply(lambda tensor: tensor.clone())


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int4", "gguf Q8_0"])
def test_a_quantized_module_that_was_moved_as_a_whole_is_given_back(kind):
    tower, x = make_tower(kind), make_input()
    expected, before = run(tower, x), parts_of(tower)
    session = Relocating(tower, CPU, "to see it come back").attach()
    assert parts_of(tower) != before
    assert torch.equal(run(tower, x), expected)
    session.detach()
    assert parts_of(tower) == before
    assert torch.equal(run(tower, x), expected)


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int4", "bitsandbytes nf4", "gguf Q4_0"])
@pytest.mark.parametrize("is_delayed", [True, False])
def test_a_quantized_module_streams_through_the_native_allocator(kind, is_delayed):
    native = pytest.importorskip("native", reason="the native extension is not built")
    from ddo.backend import NativeBackend

    limit = 1 << 26
    driver = native.FakeDriver(seed=2, is_delayed=is_delayed)
    backend = NativeBackend(driver, CPU, limit_bytes=limit, host_budget_bytes=limit)
    tower, x = make_tower(kind), make_input()
    expected, before = run(tower, x), parts_of(tower)
    with session_of(tower, backend, preset="low_memory") as session:
        for _ in range(4):
            assert torch.equal(run(tower, x), expected)
        assert session.plan.mode == "stream"
    assert driver.violations() == []
    assert parts_of(tower) == before


@pytest.mark.parametrize("kind", ["torchao int8", "gguf Q8_0"])
def test_group_may_be_asked_for_where_diffusers_moves_all_of_a_weight(kind):
    tower, x = make_tower(kind), make_input()
    expected, before = run(tower, x), parts_of(tower)
    with attach(tower, OffloadSettings(preset="group"), backend=FakeBackend()) as session:
        assert session.plan.mode == "group"
        assert torch.equal(run(tower, x), expected)
    assert parts_of(tower) == before
    assert torch.equal(run(tower, x), expected)


@pytest.mark.parametrize("kind", ["quanto int8", "bitsandbytes nf4", "bitsandbytes int8"])
def test_group_is_refused_where_diffusers_would_leave_a_part_of_a_weight_behind(kind):
    tower, x = make_tower(kind), make_input()
    expected = run(tower, x)
    reason = r"layers\.0\.up \(\w+\) is a [\w.]+, .* moves in part only; take preset stream"
    with pytest.raises(NotOwnable, match=reason):
        attach(tower, OffloadSettings(preset="group"), backend=FakeBackend())
    assert torch.equal(run(tower, x), expected)

"""LoRA adapters of a diffusers transformer come, change and go while it is attached."""

from __future__ import annotations

import warnings

import pytest
import torch

from ddo.blocks import take_inventory
from ddo.claims import SessionError
from ddo.lifecycle import OffloadSession
from ddo.settings import OffloadSettings
from tests.ddo import quantized
from tests.ddo.fake_backend import FakeBackend
from tests.ddo.flux import make_transformer, run
from tests.ddo.modules import assert_same, photograph

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@pytest.fixture
def transformer():
    return make_transformer()


def session_of(transformer, preset="stream"):
    settings = OffloadSettings(
        preset=preset, device_budget=150_001, reserve=1, link_rate="1GB", ring=60_000
    )
    return OffloadSession(transformer, settings, FakeBackend(1))


def add(transformer, name, *, seed, **options):
    """An adapter of rank 2 that changes something."""
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], **options)
    transformer.add_adapter(config, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in transformer.named_parameters():
            if f".{name}.weight" in weight_name:
                weight.data = torch.randn(weight.shape, generator=generator)
    transformer.requires_grad_(False)


def in_turn(transformer):
    """Everything that users do with adapters; yields the output after each."""
    yield "plain", run(transformer)
    add(transformer, "first", seed=1)
    yield "loaded", run(transformer)
    add(transformer, "second", seed=2)
    transformer.set_adapters("second")
    yield "switched", run(transformer)
    transformer.set_adapters(["first", "second"], weights=[0.3, 0.9])
    yield "mixed", run(transformer)
    transformer.set_adapters(["first", "second"], weights=[0.6, 0.1])
    yield "scaled", run(transformer)
    transformer.disable_adapters()
    yield "disabled", run(transformer)
    transformer.enable_adapters()
    yield "enabled", run(transformer)
    transformer.delete_adapters("first")
    yield "deleted", run(transformer)
    transformer.fuse_lora(lora_scale=0.5)
    yield "fused", run(transformer)
    transformer.unfuse_lora()
    yield "unfused", run(transformer)
    transformer.unload_lora()
    yield "unloaded", run(transformer)


@pytest.mark.parametrize("preset", ["stream", "low_memory", "resident"])
def test_everything_done_with_adapters_gives_equal_results_while_attached(transformer, preset):
    expected = list(in_turn(make_transformer()))
    assert not torch.equal(expected[0][1], expected[1][1]), "the adapter changes nothing"
    settings = OffloadSettings(preset=preset, device_budget="2MiB", reserve="1MiB")
    if preset != "resident":
        settings = session_of(transformer, preset).settings
    with OffloadSession(transformer, settings, FakeBackend(1)) as session:
        for (step, wanted), (_, found) in zip(expected, in_turn(transformer), strict=True):
            assert torch.equal(found, wanted), step
        assert session.plan.mode == ("resident" if preset == "resident" else "stream")
        assert not any(weight.is_meta for weight in transformer.parameters())
    assert torch.equal(run(transformer), expected[-1][1])


def test_a_module_whose_adapters_have_gone_again_is_restored(transformer):
    """But for the attributes that peft leaves on a module that has had one, attached or not."""
    before = photograph(transformer)
    with session_of(transformer):
        run(transformer)
        add(transformer, "first", seed=1)
        run(transformer)
        transformer.unload_lora()
        run(transformer)
    without = make_transformer()
    add(without, "first", seed=1)
    without.unload_lora()
    after = photograph(transformer)
    assert after["hooks"] == photograph(without)["hooks"]
    assert_same(before, after | {"hooks": before["hooks"]})


def test_an_adapter_that_was_fused_while_attached_stays_fused(transformer):
    plain = run(transformer)
    with session_of(transformer, "low_memory") as session:
        add(transformer, "first", seed=1)
        adapted = run(transformer)
        transformer.fuse_lora()
        fused = run(transformer)
        assert session.report().num_replans["module changed"] == 2
    assert torch.equal(run(transformer), fused)
    assert torch.allclose(fused, adapted, atol=1e-4)
    assert not torch.allclose(fused, plain, atol=1e-2)


def test_weights_cannot_be_fused_in_the_middle_of_a_step(transformer):
    add(transformer, "first", seed=1)
    expected = run(transformer)
    with session_of(transformer):
        handle = transformer.norm_out.register_forward_hook(lambda *_: transformer.fuse_lora())
        with pytest.raises(SessionError, match="in 1 steps, fuse_lora cannot change its weights"):
            run(transformer)
        handle.remove()
        assert torch.equal(run(transformer), expected)


def adapter_state(seed):
    """An adapter as a file holds it."""
    other = make_transformer()
    add(other, "default", seed=seed)
    return peft.get_peft_model_state_dict(other, adapter_name="default")


@pytest.mark.parametrize("preset", ["stream", "resident"])
def test_an_adapter_may_be_loaded_and_swapped_for_another_of_its_shape(transformer, preset):
    """What `load_lora_weights` of a pipeline does to its transformer."""
    wanted = []
    for seed in (1, 2):
        resident = make_transformer()
        resident.load_lora_adapter(adapter_state(seed), prefix=None, adapter_name="a")
        wanted.append(run(resident))
    assert not torch.equal(*wanted)
    settings = OffloadSettings(preset=preset, device_budget="2MiB", reserve="1MiB")
    settings = settings if preset == "resident" else session_of(transformer).settings
    with OffloadSession(transformer, settings, FakeBackend(2)):
        run(transformer)
        transformer.load_lora_adapter(adapter_state(1), prefix=None, adapter_name="a")
        assert torch.equal(run(transformer), wanted[0])
        transformer.load_lora_adapter(adapter_state(2), prefix=None, adapter_name="a", hotswap=True)
        for _ in range(2):
            assert torch.equal(run(transformer), wanted[1])


@pytest.mark.parametrize(
    "kind", ["torchao int8", "quanto int8", "bitsandbytes nf4", "bitsandbytes int8", "gguf Q8_0"]
)
def test_adapters_of_a_quantized_module_come_and_go_while_attached(kind):
    def adapt(tower):
        config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries that peft looks for
            peft.inject_adapter_in_model(config, tower)
        tower.requires_grad_(False)
        for layer in tower.layers:
            for adapted in (layer.up, layer.down):
                adapted.lora_A.to(torch.bfloat16)
                adapted.lora_B.to(torch.bfloat16)

    x = quantized.make_input()
    resident = quantized.make_tower(kind)
    plain = quantized.run(resident, x)
    adapt(resident)
    wanted = quantized.run(resident, x)
    assert not torch.equal(wanted, plain)

    tower = quantized.make_tower(kind)
    total = sum(block.nbytes for block in take_inventory(tower, torch.device("cpu")).blocks)
    settings = OffloadSettings(preset="low_memory", device_budget=total, reserve=1)
    with OffloadSession(tower, settings, FakeBackend(1)) as session:
        assert torch.equal(quantized.run(tower, x), plain)
        adapt(tower)
        for _ in range(2):
            assert torch.equal(quantized.run(tower, x), wanted)
        assert session.plan.mode == "stream"
        assert session.report().num_replans["module changed"] == 1
    assert torch.equal(quantized.run(tower, x), wanted)

"""What a denoising loop carries: k steps, out, into a fresh process's objects, and on."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance
from diffusers.schedulers import SchedulerMixin

from stages.checkpoints import pack, unpack
from stages.loop_state import LoopState
from stages.plain_values import NotPlain, from_plain, to_plain

# diffusers hands torch's tensors to numpy, which would like another signature of torch.
pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

NUM_STEPS = 8
# Those that the families use, and those that people put in their place.
SCHEDULERS: dict[str, dict[str, Any]] = {
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
    "FlowMatchHeunDiscreteScheduler": {},
    "FlowMatchLCMScheduler": {},
    "UniPCMultistepScheduler": {"solver_order": 3},
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "DPMSolverSinglestepScheduler": {},
    "DEISMultistepScheduler": {},
    "DDIMScheduler": {},
    "DDPMScheduler": {},
    "HeunDiscreteScheduler": {},
    "KDPM2AncestralDiscreteScheduler": {},
    "LCMScheduler": {},
    "PNDMScheduler": {},
    "IPNDMScheduler": {},
}
WITH_GENERATOR = {
    "FlowMatchLCMScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DDPMScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LCMScheduler",
}


class Loop:
    """A loop as every modular pipeline has it, with a stand-in for the transformer."""

    def __init__(self, scheduler: Any, guider: Any = None) -> None:
        self.scheduler, self.guider = scheduler, guider
        parts = {"scheduler": scheduler} | ({"guider": guider} if guider else {})
        self.pipe = SimpleNamespace(components=parts)
        scheduler.set_timesteps(NUM_STEPS)
        generator = torch.Generator().manual_seed(5)
        self.state = SimpleNamespace(
            latents=torch.randn(2, 4, 6, 6, generator=generator),
            timesteps=scheduler.timesteps,
            generator=generator,
        )
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)

    def step(self, index: int) -> None:
        state, timestep = self.state, self.state.timesteps[index]
        latents = state.latents
        if hasattr(self.scheduler, "scale_model_input"):
            latents = self.scheduler.scale_model_input(latents, timestep)
        state.noise_pred = torch.tanh(latents) * 0.3 + latents.roll(1, -1) * 0.1
        if self.guider is not None:
            other = latents.roll(1, -2) * 0.2
            self.guider.set_state(step=index, num_inference_steps=NUM_STEPS, timestep=timestep)
            batches = self.guider.prepare_inputs({"x": (state.noise_pred, other)})
            predictions = (state.noise_pred, other)
            for batch, prediction in zip(batches, predictions, strict=False):
                batch.noise_pred = prediction
            state.noise_pred = self.guider(batches)[0]
        more = {}
        if type(self.scheduler).__name__ in WITH_GENERATOR:
            more["generator"] = state.generator
        state.latents = self.scheduler.step(
            state.noise_pred, timestep, state.latents, return_dict=False, **more
        )[0]


def made(name: str) -> Any:
    return getattr(diffusers, name)(**SCHEDULERS[name])


def through_a_file(captured: dict[str, Any]) -> dict[str, Any]:
    return unpack(pack(captured, step=1, num_steps=2, binding={}))[1]


def require_equal_after_resuming(first: Loop, undisturbed: Loop, resumed: Loop, cut: int) -> None:
    watched = LoopState(first.pipe, first.state)
    for index in range(cut):
        first.step(index)
    captured = through_a_file(watched.capture(first.state))
    LoopState(resumed.pipe, resumed.state).restore(captured, resumed.state, "cpu")
    for index in range(len(undisturbed.state.timesteps)):
        undisturbed.step(index)
        if index >= cut:
            resumed.step(index)
            assert torch.equal(resumed.state.latents, undisturbed.state.latents), index
    assert torch.equal(resumed.state.generator.get_state(), undisturbed.state.generator.get_state())


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_scheduler_goes_on_with_the_same_bits(name: str, cut: int) -> None:
    require_equal_after_resuming(Loop(made(name)), Loop(made(name)), Loop(made(name)), cut)


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_latents_alone_would_not_do(name: str) -> None:
    """What the histories are kept for: without them this is another picture."""
    undisturbed, resumed = Loop(made(name)), Loop(made(name))
    for index in range(NUM_STEPS):
        if index == 3:
            resumed.state.latents = undisturbed.state.latents.clone()
            resumed.state.generator.set_state(undisturbed.state.generator.get_state())
        undisturbed.step(index)
        if index >= 3:
            resumed.step(index)
    assert not torch.equal(resumed.state.latents, undisturbed.state.latents)


@pytest.mark.parametrize(
    "guider",
    [
        ClassifierFreeGuidance(guidance_scale=4.0, stop=0.7),
        AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=-0.5),
    ],
)
def test_a_guider_goes_on_with_its_momentum_and_its_window(guider: Any) -> None:
    loops = [Loop(made("FlowMatchEulerDiscreteScheduler"), guider.new()) for _ in range(3)]
    require_equal_after_resuming(*loops, cut=4)


def test_two_schedulers_of_one_loop_are_kept_apart() -> None:
    """LTX-2's sound has a scheduler of its own, which is a value of the loop, no component."""

    class Twice(Loop):
        def __init__(self) -> None:
            super().__init__(made("UniPCMultistepScheduler"))
            self.state.audio_scheduler = copy.deepcopy(self.scheduler)
            self.state.audio_latents = self.state.latents.roll(1, 0)

        def step(self, index: int) -> None:
            super().step(index)
            state = self.state
            state.audio_latents = state.audio_scheduler.step(
                state.audio_latents * 0.4, state.timesteps[index], state.audio_latents
            ).prev_sample

    loops = [Twice() for _ in range(3)]
    require_equal_after_resuming(*loops, cut=3)
    assert torch.equal(loops[1].state.audio_latents, loops[2].state.audio_latents)


def test_only_what_the_loop_changed_is_kept() -> None:
    loop = Loop(made("FlowMatchEulerDiscreteScheduler"))
    loop.state.prompt_embeds = torch.zeros(1, 512, 64)
    loop.state.in_place, loop.state.listed = torch.zeros(3), [torch.zeros(2), torch.ones(2)]
    watched = LoopState(loop.pipe, loop.state)
    loop.step(0)
    loop.state.in_place.add_(1)
    loop.state.listed[1].mul_(3)
    loop.state.model = loop.scheduler
    captured = watched.capture(loop.state)
    assert set(captured["values"]) == {"latents", "noise_pred", "in_place", "listed", "model"}
    assert captured["values"]["model"] == {"$known": "component scheduler"}


def test_a_scheduler_with_a_function_in_it_is_refused_by_name() -> None:
    loop = Loop(diffusers.SASolverScheduler())
    with pytest.raises(NotPlain, match=r"component scheduler\.tau_func is a builtins\.function"):
        LoopState(loop.pipe, loop.state).capture(loop.state)


@pytest.mark.parametrize("value", [object(), [1, {"cache": SimpleNamespace()}], {1, 2}])
def test_a_loop_with_a_value_whose_changes_do_not_show_is_refused(value: Any) -> None:
    loop = Loop(made("FlowMatchEulerDiscreteScheduler"))
    loop.state.kv_cache = value
    with pytest.raises(NotPlain, match="block value kv_cache"):
        LoopState(loop.pipe, loop.state)


def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    first, other = Loop(made("EulerDiscreteScheduler")), Loop(made("UniPCMultistepScheduler"))
    captured = LoopState(first.pipe, first.state).capture(first.state)
    before = other.state.latents
    with pytest.raises(NotPlain, match="EulerDiscreteScheduler"):
        LoopState(other.pipe, other.state).restore(captured, other.state, "cpu")
    assert other.state.latents is before
    assert isinstance(other.scheduler, SchedulerMixin) and other.scheduler.lower_order_nums == 0


@pytest.mark.parametrize(
    "value",
    [
        (1, [2.5, None], {"a": ("b", True)}),
        float("inf"),
        -0.0,
        torch.float16,
        torch.Size([2, 3]),
        torch.device("cpu"),
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = through_a_file({"value": to_plain(value, "value", {})})["value"]
    again = from_plain(back, {}, "cpu")
    assert repr(again) == repr(value) and type(again) is type(value)


def test_a_number_of_numpy_keeps_its_type_and_a_tensor_its_strides() -> None:
    import numpy as np

    channels_last = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    values = {"scalar": np.float32(0.1), "tensor": channels_last}
    back = through_a_file({k: to_plain(v, k, {}) for k, v in values.items()})
    assert type(from_plain(back["scalar"], {}, "cpu")) is np.float32
    tensor = from_plain(back["tensor"], {}, "cpu")
    assert tensor.stride() == channels_last.stride() and torch.equal(tensor, channels_last)


@pytest.mark.parametrize("where", ["os:system", "diffusers.guiders:NoSuchGuider", "builtins:dict"])
def test_no_class_from_elsewhere_is_made(where: str) -> None:
    with pytest.raises(NotPlain, match="which this diffusers does not have"):
        from_plain({"$object": where, "state": {}}, {}, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_go_back_to_where_they_were() -> None:
    values = {"here": torch.ones(2), "there": torch.ones(2, device="cuda")}
    back = through_a_file({k: to_plain(v, k, {}) for k, v in values.items()})
    places = {k: from_plain(v, {}, "cuda:0").device.type for k, v in back.items()}
    assert places == {"here": "cpu", "there": "cuda"}

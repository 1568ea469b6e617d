"""The loop of a classic pipeline, which is inside its call, seen from its scheduler.

Every classic pipeline asks its scheduler for one step a turn, and what it carries to the next
turn is what that call returned. So the call is where a turn ends, where progress is told and a
checkpoint is taken; and a loop resumes by answering the calls of finished steps with what the
last of them returned, while the denoiser rests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LoopValues:
    """What a loop carries, as `stages.loop` and `stages.checkpoints` look at it.

    Attributes:
        timesteps: All of the schedule.
        generator: What the scheduler draws from.
        made: What the scheduler's last step returned; None before the first one.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.timesteps: Any = ()
        self.generator = generator
        self.made: Any = None

    @property
    def latents(self) -> Any:
        """The latents after the last step."""
        return None if self.made is None else self.made[0]


@contextmanager
def stepping(
    pipe: Any, denoiser_name: str, loop: Any, components: Any, generator: torch.Generator | None
) -> Iterator[None]:
    """While open, each step of a pipeline's scheduler is one of `loop.loop_step`.

    Args:
        loop: Has `asked_step`, which is set to what makes the step, and `num_skipped`, which
            its hook sets before the first step is over: so many steps are not made, since their
            outcome is known.

    When steps are skipped, the denoiser is still called for the first one, and what it made
    stands in for what it would make in the others: of the right shape, and read by nobody.
    """
    values, denoiser = LoopValues(generator), getattr(pipe, denoiser_name)
    num_asked, stand_in = 0, None
    loop.num_skipped = 0
    kind, forward = type(pipe.scheduler), denoiser.forward

    @functools.wraps(kind.step)
    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal num_asked
        if num_asked == 0:
            values.timesteps = self.timesteps
        loop.asked_step = functools.partial(kind.step, self, *arguments, **options)
        loop.loop_step(components, values, i=num_asked)
        num_asked += 1
        return values.made

    @functools.wraps(forward)
    def rest_or_compute(*arguments: Any, **options: Any) -> Any:
        nonlocal stand_in
        if num_asked and num_asked < loop.num_skipped:
            return stand_in
        made = forward(*arguments, **options)
        stand_in = None if num_asked else made
        return made

    with _as_class(pipe.scheduler, step=step), _with_forward(denoiser, rest_or_compute):
        yield


@contextmanager
def run_out(scheduler: Any) -> Iterator[None]:
    """While open, a scheduler has no steps to make and leaves given latents as they are."""
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *_: Any, device: Any = None, **__: Any) -> None:
        self.timesteps = torch.empty(0, device=device)

    unscaled = property(lambda _: 1.0)
    with _as_class(scheduler, set_timesteps=set_timesteps, init_noise_sigma=unscaled):
        yield


@contextmanager
def _as_class(instance: Any, **members: Any) -> Iterator[None]:
    """While open, an object is of a subclass of its class that has these members.

    Not by attributes of its own: those are its state, which checkpoints keep.
    """
    kind = type(instance)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    instance.__class__ = type(kind.__name__, (kind,), named | members)
    try:
        yield
    finally:
        instance.__class__ = kind


@contextmanager
def _with_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, a model computes by another function; an offloader's own one comes back."""
    own = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own

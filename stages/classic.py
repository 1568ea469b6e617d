"""A classic pipeline of diffusers as three modular blocks, for families that have no modular one.

The blocks call the pipeline's own code: `encode_prompt`, then the pipeline itself as far as its
latents, then the pipeline itself once more, with these latents and a schedule that has run out,
so that only what comes after its loop is done. So each family's own tail (scaling, crops,
safety checkers) is run and not rewritten, and nothing here knows a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers.modular_pipelines import (
    ComponentSpec,
    ConfigSpec,
    InputParam,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    OutputParam,
    SequentialPipelineBlocks,
)

from stages.classic_signature import COUNTS, Classic
from stages.classic_steps import run_out, stepping
from stages.errors import BorderError
from stages.families import Family

ARGUMENTS = "call_arguments"
"""The value that hands the denoiser's own arguments to the decoder, which calls it again."""


def classic_blocks(family: Family) -> Any:
    """The blocks of a family's classic pipeline: `text_encoder`, `denoise`, `decode`."""
    import diffusers

    classic = Classic(family, getattr(diffusers, family.pipeline))
    return SequentialPipelineBlocks.from_blocks_dict(
        {
            "text_encoder": EncodeBlock(classic),
            "denoise": DenoiseBlock(classic),
            "decode": DecodeBlock(classic),
        }
    )


class _OfClassic:
    """What the three blocks have in common."""

    model_name = "classic"

    def __init__(self, classic: Classic) -> None:
        super().__init__()
        self.classic = classic

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        return self.classic.settings


class EncodeBlock(_OfClassic, ModularPipelineBlocks):  # type: ignore[misc]
    """Prompts to embeddings, by the pipeline's `encode_prompt`."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.text_components)

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name, default=d) for name, d in self.classic.text_arguments.items()]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(name) for name in self.classic.family.encoded]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        values, classic = self.get_block_state(state), self.classic
        pipe = classic.pipe(components)
        taken = inspect.signature(pipe.encode_prompt).parameters
        made = pipe.encode_prompt(
            **{name: getattr(values, name) for name in classic.text_arguments},
            **dict.fromkeys(set(COUNTS) & set(taken), 1),
            do_classifier_free_guidance=components.guider.guidance_scale > 1,
            device=components._execution_device,
        )
        for name, value in zip(classic.family.encoded, made, strict=True):
            setattr(values, name, value)
        self.set_block_state(state, values)
        return components, state


class DenoiseBlock(_OfClassic, LoopSequentialPipelineBlocks):  # type: ignore[misc]
    """Noise to latents, by the pipeline itself; a step of its scheduler is a step of this loop."""

    num_skipped = 0
    asked_step: Callable[[], Any]  # set for each step, see `stages.classic_steps`

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.loop_components)

    @property
    def inputs(self) -> list[InputParam]:
        names = (*self.classic.family.encoded, *self.classic.loop_arguments, "generator")
        return [InputParam(name) for name in names]

    @property
    def required_inputs(self) -> list[str]:
        return []

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents"), OutputParam(ARGUMENTS)]

    def loop_step(self, components: Any, block_state: Any, **_: Any) -> tuple[Any, Any]:
        """One turn: the step that the scheduler was asked for."""
        block_state.made = self.asked_step()
        return components, block_state

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        values, classic = self.get_block_state(state), self.classic
        pipe = classic.pipe(components)
        arguments = _given(values, classic.loop_arguments)
        with stepping(pipe, classic.family.denoiser, self, components, values.generator):
            values.latents = pipe(
                **arguments,
                **_given(values, classic.family.encoded),
                negative_prompt=None,
                guidance_scale=components.guider.guidance_scale,
                generator=values.generator,
                output_type="latent",
                return_dict=False,
            )[0]
        setattr(values, ARGUMENTS, arguments)
        self.set_block_state(state, values)
        return components, state


class DecodeBlock(_OfClassic, ModularPipelineBlocks):  # type: ignore[misc]
    """Latents to pictures or frames, by what the pipeline does after its loop."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.last_components)

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("latents", required=True),
            InputParam(ARGUMENTS, required=True),
            InputParam("output_type", default="pil"),
            InputParam("generator"),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam(self.classic.family.output)]

    @torch.no_grad()
    def __call__(self, components: Any, state: Any) -> tuple[Any, Any]:
        values, classic = self.get_block_state(state), self.classic
        pipe = classic.pipe(components)
        with run_out(pipe.scheduler):
            made = pipe(
                **getattr(values, ARGUMENTS),
                **_unread(classic.family.encoded, values.latents),
                latents=values.latents,
                negative_prompt=None,
                guidance_scale=1.0,
                generator=values.generator,
                output_type=values.output_type,
                return_dict=False,
            )
        _require_unflagged(made[1:])
        setattr(values, classic.family.output, made[0])
        self.set_block_state(state, values)
        return components, state


def _given(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(values, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _unread(encoded: tuple[str, ...], latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Embeddings for a loop without steps: the pipeline asks for some, and reads none."""
    embeds = latents.new_zeros(len(latents), 1, 1)
    return {
        name: embeds[:, 0] if name.endswith("mask") else embeds
        for name in encoded
        if not name.startswith("negative_")
    }


def _require_unflagged(verdicts: tuple[Any, ...]) -> None:
    """Tell of a picture that the model's own safety checker has painted black."""
    if any(any(flags) for flags in verdicts if isinstance(flags, list)):
        raise BorderError(
            "decode: the model's safety checker took the picture for one that it may not show and "
            "painted it black; choose another prompt or seed"
        )

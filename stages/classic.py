"""A classic pipeline of diffusers as three modular blocks, for families that have no modular one.

The blocks call the pipeline's own code: `encode_prompt`, then the pipeline itself as far as its
latents, then the pipeline itself once more, with these latents and a schedule that has run out,
so that only what comes after its loop is done. So each family's own tail (scaling, crops,
safety checkers) is run and not rewritten, and nothing here knows a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines import (
    ComponentSpec,
    ConfigSpec,
    InputParam,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    OutputParam,
    SequentialPipelineBlocks,
)

from stages.classic_steps import run_out, stepping
from stages.errors import BorderError
from stages.families import Family

ARGUMENTS = "call_arguments"
"""The value that hands the denoiser's own arguments to the decoder, which calls it again."""

GUIDER = "guider"
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
_OURS = frozenset(
    {
        *("self", "kwargs", "generator", "latents", "output_type", "return_dict", *_COUNTS),
        *("callback", "callback_steps", "callback_on_step_end"),
        *("callback_on_step_end_tensor_inputs", "do_classifier_free_guidance", "guidance_scale"),
        *("device", "dtype", "lora_scale", "ip_adapter_image", "ip_adapter_image_embeds"),
    }
)
"""Arguments that the blocks give themselves, or that no declaration asks for."""


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


@dataclass(frozen=True, slots=True)
class Classic:
    """A classic pipeline class, and what its signatures tell."""

    family: Family
    kind: type[Any]

    @property
    def text_components(self) -> set[str]:
        """Tokenizers and the encoders that they feed."""
        readings = self.family.tokenizers
        return set(readings) | {reading.encoder for reading in readings.values()}

    @property
    def loop_components(self) -> set[str]:
        """What denoises."""
        return {self.family.denoiser, "scheduler"}

    @property
    def last_components(self) -> set[str]:
        """The others, and the scheduler, whose configuration some pipelines read as they begin."""
        names, _ = self.kind._get_signature_keys(self.kind)
        return (set(names) - self.text_components - self.loop_components) | {"scheduler"}

    @property
    def text_arguments(self) -> dict[str, Any]:
        """Names and defaults of what the prompt is encoded with.

        Where both have a default, it is that of the whole pipeline.
        """
        whole = inspect.signature(self.kind.__call__).parameters
        own = inspect.signature(self.kind.encode_prompt).parameters
        names = [name for name in own if name in whole and name not in _OURS]
        return {name: whole[name].default for name in names if name not in self.family.encoded}

    @property
    def loop_arguments(self) -> tuple[str, ...]:
        """Names of the pipeline's other arguments, such as its size and its number of steps."""
        left_out = _OURS | set(self.text_arguments) | set(self.family.encoded)
        return tuple(
            n for n in inspect.signature(self.kind.__call__).parameters if n not in left_out
        )

    @property
    def guider(self) -> ComponentSpec:
        """Where the scale stands, by default the pipeline's own."""
        default = inspect.signature(self.kind.__call__).parameters["guidance_scale"].default
        return ComponentSpec(
            GUIDER,
            ClassifierFreeGuidance,
            config=FrozenDict({"guidance_scale": float(default)}),
            default_creation_method="from_config",
        )

    @property
    def settings(self) -> list[ConfigSpec]:
        """What the pipeline is made with besides components."""
        _, names = self.kind._get_signature_keys(self.kind)
        own = inspect.signature(self.kind.__init__).parameters
        return [ConfigSpec(name, own[name].default) for name in names]

    def specs(self, names: set[str]) -> list[ComponentSpec]:
        """Specifications of components whose classes the model's index tells."""
        return [self.guider, *(ComponentSpec(name) for name in sorted(names))]

    def pipe(self, components: Any) -> Any:
        """The pipeline over a phase's components; absent ones are stand-ins, or None."""
        device = components._execution_device
        where = property(lambda _: device)  # by itself it asks its first model, perhaps a stand-in
        kind: Any = type(self.kind.__name__, (self.kind,), {"_execution_device": where})
        names, _ = self.kind._get_signature_keys(self.kind)
        parts = {name: getattr(components, name, None) for name in names}
        settings = {each.name: components.config[each.name] for each in self.settings}
        pipe = kind(**parts, **settings)
        pipe.set_progress_bar_config(disable=True)
        return pipe


class EncodeBlock(ModularPipelineBlocks):  # type: ignore[misc]
    """Prompts to embeddings, by the pipeline's `encode_prompt`."""

    model_name = "classic"

    def __init__(self, classic: Classic) -> None:
        super().__init__()
        self.classic = classic

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.text_components)

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        return self.classic.settings

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
            **dict.fromkeys(set(_COUNTS) & set(taken), 1),
            do_classifier_free_guidance=components.guider.guidance_scale > 1,
            device=components._execution_device,
        )
        for name, value in zip(classic.family.encoded, made, strict=True):
            setattr(values, name, value)
        self.set_block_state(state, values)
        return components, state


class DenoiseBlock(LoopSequentialPipelineBlocks):  # type: ignore[misc]
    """Noise to latents, by the pipeline itself; a step of its scheduler is a step of this loop."""

    model_name = "classic"

    def __init__(self, classic: Classic) -> None:
        super().__init__()
        self.classic = classic
        self.num_skipped = 0
        self.asked_step: Callable[[], Any] = tuple

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.loop_components)

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        return self.classic.settings

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


class DecodeBlock(ModularPipelineBlocks):  # type: ignore[misc]
    """Latents to pictures or frames, by what the pipeline does after its loop."""

    model_name = "classic"

    def __init__(self, classic: Classic) -> None:
        super().__init__()
        self.classic = classic

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return self.classic.specs(self.classic.last_components)

    @property
    def expected_configs(self) -> list[ConfigSpec]:
        return self.classic.settings

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
    names = [name for name in encoded if not name.startswith("negative_")]
    shapes = {name: (1, 1) if name.endswith("mask") else (1, 1, 1) for name in names}
    return {
        name: torch.zeros(len(latents), *shape[1:], dtype=latents.dtype, device=latents.device)
        for name, shape in shapes.items()
    }


def _require_unflagged(verdicts: tuple[Any, ...]) -> None:
    """Tell of a picture that the model's own safety checker has painted black."""
    if any(any(flags) for flags in verdicts if isinstance(flags, list)):
        raise BorderError(
            "decode: the model's safety checker took the picture for one that it may not show and "
            "painted it black; choose another prompt or seed"
        )

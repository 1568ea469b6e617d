"""What the signatures of a classic pipeline tell: components and arguments, phase by phase."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from diffusers import ClassifierFreeGuidance
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines import ComponentSpec, ConfigSpec

from stages.families import Family

COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""What pipelines call the number of results per prompt; here it is always one."""

_GUIDER = "guider"
_OURS = frozenset(
    {
        *("self", "kwargs", "generator", "latents", "output_type", "return_dict", *COUNTS),
        *("callback", "callback_steps", "callback_on_step_end"),
        *("callback_on_step_end_tensor_inputs", "do_classifier_free_guidance", "guidance_scale"),
        *("device", "dtype", "lora_scale", "ip_adapter_image", "ip_adapter_image_embeds"),
    }
)
"""Arguments that the blocks give themselves, or that no declaration asks for."""


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
            _GUIDER,
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

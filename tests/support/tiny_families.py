"""Each family with its tiny model and a job that it is tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stages.families import Family, family_named
from tests.support import tiny_models

PROMPT = "a small red fox"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's job.

    Attributes:
        build: Writes its tiny model.
        text: Options of the encode phase besides the prompt.
        loop: Options of the denoise phase besides size and steps.
        scale: What its guiders are set to; None where it has none.
        loads: The components with weights of each phase.
        command: The command that runs it, if it is not called like the family.
        trained_at: Pixels of an edge, by the tiny model's configuration.
    """

    name: str
    build: Callable[..., Path]
    text: dict[str, Any]
    loop: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    loads: dict[str, set[str]]
    command: str = ""
    trained_at: int = 64

    @property
    def family(self) -> Family:
        return family_named(self.name)

    @property
    def guidance(self) -> dict[str, float]:
        return dict.fromkeys(self.family.guidance, self.scale or 0.0)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The pipeline's own arguments, by phase."""
        return {
            "encode": {"prompt": PROMPT, **self.text},
            "denoise": {"height": 64, "width": 64, "num_inference_steps": 3, **self.loop},
            "decode": {},
        }

    @property
    def requests(self) -> dict[str, dict[str, Any]]:
        """The options of the stages' requests: those of the pipeline, and the guiders' scales."""
        found = self.options
        if self.scale is not None:
            found["encode"]["do_classifier_free_guidance"] = self.scale > 1
            found["denoise"] |= dict.fromkeys(self.family.guidance.values(), self.scale)
        return found


CASES = {
    case.name: case
    for case in (
        Case(
            name="z-image",
            build=tiny_models.z_image,
            text={"negative_prompt": "blurry", "max_sequence_length": 64},
            scale=3.0,
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
        ),
        Case(
            name="flux",
            build=tiny_models.flux,
            text={"max_sequence_length": 32},
            loop={"guidance_scale": 3.5},
            loads={
                "encode": {"text_encoder", "text_encoder_2"},
                "denoise": {"transformer"},
                "decode": {"vae"},
            },
        ),
        Case(
            name="sdxl",
            build=tiny_models.sdxl,
            text={"negative_prompt": "blurry"},
            scale=5.0,
            loads={
                "encode": {"text_encoder", "text_encoder_2"},
                "denoise": {"unet"},
                "decode": {"vae"},
            },
        ),
        Case(
            name="sd15",
            build=tiny_models.sd15,
            text={"negative_prompt": "blurry"},
            scale=7.5,
            loads={"encode": {"text_encoder"}, "denoise": {"unet"}, "decode": {"vae"}},
        ),
        Case(
            name="pixart",
            build=tiny_models.pixart,
            text={"negative_prompt": "blurry", "max_sequence_length": 32, "clean_caption": False},
            loop={"use_resolution_binning": False},
            scale=4.5,
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
        ),
        Case(
            name="sana",
            build=tiny_models.sana,
            text={"negative_prompt": "blurry", "max_sequence_length": 32},
            loop={"use_resolution_binning": False},
            scale=4.5,
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
        ),
        Case(
            name="sd3",
            build=tiny_models.sd3,
            text={"negative_prompt": "blurry", "max_sequence_length": 32},
            scale=7.0,
            loads={
                "encode": {"text_encoder", "text_encoder_2", "text_encoder_3"},
                "denoise": {"transformer"},
                "decode": {"vae"},
            },
        ),
        Case(
            name="qwen-image",
            build=tiny_models.qwen_image,
            # its template alone is more than a hundred tokens of the tiny tokenizer
            text={"negative_prompt": "blurry", "max_sequence_length": 256},
            scale=4.0,
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
            trained_at=1024,
        ),
        Case(
            name="flux2-klein",
            build=tiny_models.flux2_klein,
            text={"max_sequence_length": 64},
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
        ),
        Case(
            name="flux2-klein-base",
            command="flux2-klein",
            build=partial(tiny_models.flux2_klein, is_distilled=False),
            text={"max_sequence_length": 64},
            scale=4.0,
            loads={"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}},
        ),
    )
}

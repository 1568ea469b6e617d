"""Each family that makes videos, with its tiny model and a job that it is tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stages.families import Family, family_named
from tests.support import tiny_videos

PROMPT = 'a small red fox says "hello"'
NUM_FRAMES = 9


@dataclass(frozen=True, kw_only=True)
class VideoCase:
    """A family's job.

    Attributes:
        build: Writes its tiny model.
        text: Options of the encode phase besides the prompts.
        loop: Options of the denoise phase besides size and steps.
        last: Options of the decode phase besides size.
        is_sized_last: Whether the decode phase has to be told the size.
        scales: What each of its guiders is set to.
        loads: The components with weights of each phase.
        command: The command that runs it, if it is not called like the family.
        frame_rate: Frames a second of the file.
        edge: Pixels along each edge.
    """

    name: str
    build: Callable[..., Path]
    text: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    is_sized_last: bool = False
    scales: dict[str, float]
    loads: dict[str, set[str]]
    command: str = ""
    frame_rate: float
    edge: int = 64

    @property
    def family(self) -> Family:
        return family_named(self.name)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The pipeline's own arguments, by phase."""
        size = {"height": self.edge, "width": self.edge, "num_frames": NUM_FRAMES}
        return {
            "encode": {"prompt": PROMPT, "negative_prompt": "blurry", **self.text},
            "denoise": {**size, "num_inference_steps": 4, **self.loop},
            "decode": self.last | (size if self.is_sized_last else {}),
        }

    @property
    def requests(self) -> dict[str, dict[str, Any]]:
        """The options of the stages' requests: guiders' scales and the file's frame rate too."""
        found = self.options
        found["encode"]["do_classifier_free_guidance"] = True
        found["denoise"] |= {
            option: self.scales[guider] for guider, option in self.family.guidance.items()
        }
        found["decode"]["frame_rate"] = self.frame_rate
        return found


SHORT = {"max_sequence_length": 32}
WAN_LOADS = {"encode": {"text_encoder"}, "denoise": {"transformer"}, "decode": {"vae"}}

VIDEO_CASES = {
    case.name: case
    for case in (
        VideoCase(
            name="wan",
            build=tiny_videos.wan,
            text=SHORT,
            scales={"guider": 5.0},
            loads=WAN_LOADS,
            frame_rate=16,
        ),
        VideoCase(
            name="wan22",
            command="wan",
            build=partial(tiny_videos.wan, num_transformers=2),
            text=SHORT,
            scales={"guider": 4.0, "guider_2": 3.0},
            loads=WAN_LOADS | {"denoise": {"transformer", "transformer_2"}},
            frame_rate=16,
        ),
        VideoCase(
            name="ltx",
            build=tiny_videos.ltx,
            text=SHORT,
            loop={"frame_rate": 25},
            last={"decode_timestep": 0.05, "decode_noise_scale": 0.025},
            is_sized_last=True,
            scales={"guider": 3.0},
            loads=WAN_LOADS,
            frame_rate=25,
        ),
        VideoCase(
            name="ltx2",
            build=tiny_videos.ltx2,
            text=SHORT,
            loop={"frame_rate": 24.0},
            is_sized_last=True,
            scales={"guider": 3.0, "audio_guider": 7.0},
            loads={
                "encode": {"text_encoder", "connectors"},
                "denoise": {"transformer"},
                "decode": {"vae", "audio_vae", "vocoder"},
            },
            frame_rate=24.0,
            edge=32,
        ),
        VideoCase(
            name="hunyuan-video",
            build=tiny_videos.hunyuan_video,
            scales={"guider": 6.0},
            loads={
                "encode": {"text_encoder", "text_encoder_2"},
                "denoise": {"transformer"},
                "decode": {"vae"},
            },
            frame_rate=24,
            edge=32,
        ),
    )
}

"""Each family that makes videos, with its tiny model and the jobs that it is tried with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from PIL import Image

from stages.families import Family, family_named
from tests.support import tiny_videos

PROMPT = 'a small red fox says "hello"'
NUM_FRAMES = 9


def picture(seed: int, edge: int = 64) -> Image.Image:
    """Colours that run into each other, as a photograph's do."""
    corners = np.random.default_rng(seed).integers(0, 255, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((edge, edge), Image.Resampling.BICUBIC)


def half_masked(column: int, edge: int = 64) -> Image.Image:
    """A mask that is white from a column on."""
    levels = np.zeros((edge, edge), np.uint8)
    levels[:, column:] = 255
    return Image.fromarray(levels)


@dataclass(frozen=True, kw_only=True)
class VideoCase:
    """A family's job.

    Attributes:
        task: The family's task.
        media: Pictures by the pipeline's names.
        start: Options of the condition phase besides size.
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
    task: str = "text-to-video"
    media: Mapping[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
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
    def other_media(self) -> dict[str, Any]:
        """Pictures that differ from `media`."""
        return {
            name: medium[::-1] if isinstance(medium, list) else picture(2, self.edge)
            for name, medium in self.media.items()
        }

    @property
    def sized(self) -> dict[str, Any]:
        """What of the size the condition phase takes."""
        names = {"wan": ("height", "width", "num_frames")}.get(self.name[:3], ("height", "width"))
        size = {"height": self.edge, "width": self.edge, "num_frames": NUM_FRAMES}
        return {name: size[name] for name in names}

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The pipeline's own arguments, by phase."""
        size = {"height": self.edge, "width": self.edge, "num_frames": NUM_FRAMES}
        found = {
            "encode": {"prompt": PROMPT, "negative_prompt": "blurry", **self.text},
            "condition": {**self.sized, **self.start},
            "denoise": {**size, "num_inference_steps": 4, **self.loop},
            "decode": self.last | (size if self.is_sized_last else {}),
        }
        if not self.media:
            del found["condition"]
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """The whole pipeline's arguments."""
        every = {key: value for options in self.options.values() for key, value in options.items()}
        return {**every, **self.media}

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

TEXT_CASES = {
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
            name="cogvideox",
            build=tiny_videos.cogvideox,
            text=SHORT,
            scales={"guider": 6.0},
            loads=WAN_LOADS,
            frame_rate=8,
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


FROM_PICTURE = {"task": "image-to-video", "media": {"image": picture(1)}}

PICTURE_CASES = {
    f"{case.name} from a picture": case
    for case in (
        replace(
            TEXT_CASES["wan"],
            name="wan-i2v",
            build=partial(
                tiny_videos.wan,
                kind=diffusers.WanImageToVideoPipeline,
                in_channels=36,
                image_dim=16,
                added_kv_proj_dim=24,
            ),
            command="wan",
            loads=WAN_LOADS | {"condition": {"vae", "image_encoder"}},
            **FROM_PICTURE,
        ),
        replace(
            TEXT_CASES["wan22"],
            name="wan22-i2v",
            build=partial(
                tiny_videos.wan,
                kind=diffusers.WanImageToVideoPipeline,
                in_channels=36,
                num_transformers=2,
            ),
            loads=TEXT_CASES["wan22"].loads | {"condition": {"vae"}},
            **FROM_PICTURE,
        ),
        replace(
            TEXT_CASES["ltx"],
            loads=WAN_LOADS | {"condition": {"vae"}},
            **FROM_PICTURE,
        ),
        replace(
            TEXT_CASES["ltx2"],
            start={"image_crf": 33},
            loads=TEXT_CASES["ltx2"].loads | {"condition": {"vae"}},
            task="image-to-video",
            media={"image": picture(1, 32)},
        ),
        replace(
            TEXT_CASES["hunyuan-video"],
            name="hunyuan-video-i2v",
            command="hunyuan-video",
            build=partial(tiny_videos.hunyuan_video, looks_at_pictures=True),
            loads=TEXT_CASES["hunyuan-video"].loads | {"condition": {"vae", "image_encoder"}},
            task="image-to-video",
            media={"image": picture(1, 32)},
        ),
    )
}

VACE_CASES = {
    "wan22-vace": replace(
        TEXT_CASES["wan22"],
        name="wan22-vace",
        command="wan-vace",
        build=partial(tiny_videos.wan, kind=diffusers.WanVACEPipeline, num_transformers=2),
        loads=TEXT_CASES["wan22"].loads | {"condition": {"vae"}},
        start={"conditioning_scale": 0.7},
        task="video-conditioning",
        media={
            "video": [picture(n) for n in range(NUM_FRAMES)],
            "mask": [half_masked(16 + n) for n in range(NUM_FRAMES)],
            "reference_images": [picture(20, 48)],
        },
    )
}

VIDEO_CASES = TEXT_CASES | PICTURE_CASES | VACE_CASES

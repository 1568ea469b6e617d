"""What a model family declares; everything else is computed from its pipeline's blocks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stages.errors import ModelError, RequestError

FAMILIES: Mapping[str, str] = {
    "cogvideox": "stages.families.cogvideox:FAMILY",
    "flux": "stages.families.flux:FAMILY",
    "flux-kontext": "stages.families.flux:KONTEXT",
    "flux2-klein": "stages.families.flux2_klein:FAMILY",
    "flux2-klein-base": "stages.families.flux2_klein:BASE",
    "hunyuan-video": "stages.families.hunyuan_video:FAMILY",
    "hunyuan-video-i2v": "stages.families.hunyuan_video:FROM_IMAGE",
    "ltx": "stages.families.ltx:FAMILY",
    "ltx2": "stages.families.ltx2:FAMILY",
    "pixart": "stages.families.pixart:FAMILY",
    "qwen-image": "stages.families.qwen_image:FAMILY",
    "qwen-image-edit": "stages.families.qwen_image:EDITOR",
    "qwen-image-edit-plus": "stages.families.qwen_image:EDITOR_PLUS",
    "sana": "stages.families.sana:FAMILY",
    "sd15": "stages.families.sd15:FAMILY",
    "sd3": "stages.families.sd3:FAMILY",
    "sdxl": "stages.families.sdxl:FAMILY",
    "wan": "stages.families.wan:FAMILY",
    "wan-i2v": "stages.families.wan:FROM_IMAGE",
    "wan22": "stages.families.wan:FAMILY_22",
    "wan22-i2v": "stages.families.wan:FROM_IMAGE_22",
    "wan22-vace": "stages.families.wan:VACE_22",
    "z-image": "stages.families.z_image:FAMILY",
}
"""Each family by its name, with where it is declared, as `module:name`."""

Tasks = dict[str, tuple[str, ...]]

TEXT_TO_IMAGE: Tasks = {"text-to-image": ("prompt",)}
IMAGE_TO_IMAGE: Tasks = {"image-to-image": ("prompt", "image")}
INPAINT: Tasks = {"inpaint": ("prompt", "image", "mask_image")}
EDIT: Tasks = {"edit": ("prompt", "image")}
TEXT_TO_VIDEO: Tasks = {"text-to-video": ("prompt",)}
IMAGE_TO_VIDEO: Tasks = {"image-to-video": ("prompt", "image")}
VIDEO_CONDITIONING: Tasks = {"video-conditioning": ("prompt", "video", "mask", "reference_images")}
FIRST_AND_LAST_FRAME: Tasks = {"first-and-last-frame": ("prompt", "image", "last_image")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a tokenizer reads a prompt.

    Attributes:
        encoder: The text encoder that it feeds.
        limit: Where the most tokens stand: in the request's `option`, or in the tokenizer's
            `own` configuration; a number where the pipeline has one of its own.
        template: What the prompt is put into first: nothing, the tokenizer's chat template with
            thinking on or off, or a text with a `{}` in it, as `module:NAME`.
        system: What the chat template says before the prompt, as `module:Class.property`.
        num_unread: Tokens of the template that come before the prompt and count in no limit.
        is_lowered: Whether the pipeline writes the prompt in small letters first, without the
            spaces around it.
        instruction: Lines that the pipeline puts before a prompt, not before a negative one, by
            default, as `module:Class.argument`; they count in no limit but for two tokens.
    """

    encoder: str
    limit: Literal["option", "own"] | int = "option"
    template: str = ""
    system: str = ""
    num_unread: int = 0
    is_lowered: bool = False
    instruction: str = ""


CHAT = "chat"
CHAT_WITHOUT_THINKING = "chat without thinking"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family: the few facts that its pipeline's blocks do not tell.

    Attributes:
        name: What users type, such as `z-image`.
        pipeline: Modular pipeline class of diffusers; the classic one where there is no other.
        encoded: What `encode_prompt` of a classic pipeline returns, by the names of the
            pipeline's arguments, in order; empty for modular ones.
        models: Pipeline classes that a model directory of this family may name.
        tasks: For each task, the inputs that select its blocks.
        output: The value of the last phase that is the product: `images` or `videos`.
        sound: The value of the last phase that is heard with a video; empty if there is none.
        sound_rate: Component and entry of its configuration that tell the sound's samples a second.
        denoiser: The component that denoises.
        guidance: Guider component -> the option that sets its scale; empty where the scale
            is an ordinary argument of the pipeline.
        tokenizers: Tokenizer component -> how it reads; the order is that of the report on
            truncated prompts.
        token_limit: The option that limits the number of tokens; empty if there is none.
        max_tokens: The largest value of that option that its text encoder was made for.
        sized_by: The component whose `sample_size` tells the size it was trained at: in pixels
            for the VAE, in latents for the denoiser.
        edge: That size in pixels where no component tells it.
        carried: Tensors that the denoising loop carries from step to step.
        layout: The axes of latents of so many dimensions, where they are not those of
            `stages.latents`.
        drawing: Phases before `denoise` that draw from the generator, such as a VAE that samples
            its latents; what they make belongs to one seed.
        finished: Tasks whose last block takes and gives finished pictures, not tensors: it lays
            what was painted over the picture that was given.
        constants: Values that may be all one number without being wrong.
        lent: Phase -> components whose configuration is enough there.
        optional: Components that a model may do without.
        dtypes: Component -> dtype, where it is not the dtype of the request.
        preload: What a fork server imports for this family, as `module:name`.
    """

    name: str
    pipeline: str
    models: tuple[str, ...]
    tasks: Mapping[str, tuple[str, ...]]
    output: str
    encoded: tuple[str, ...] = ()
    sound: str = ""
    sound_rate: tuple[str, str] = ("", "")
    denoiser: str = "transformer"
    guidance: Mapping[str, str] = field(default_factory=dict)
    tokenizers: Mapping[str, Reading] = field(default_factory=dict)
    token_limit: str = "max_sequence_length"
    max_tokens: int = 512
    sized_by: str = "vae"
    edge: int = 1024
    carried: tuple[str, ...] = ("latents",)
    layout: str = ""
    drawing: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    lent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    @property
    def products(self) -> tuple[str, ...]:
        """The values of the last phase that are kept."""
        return (self.output, self.sound) if self.sound else (self.output,)


def family_named(name: str) -> Family:
    """The declaration of a family.

    Raises:
        RequestError: No family has this name; the message lists those there are.
    """
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise RequestError(f"family {name!r} is unknown; the families are {known}")
    module, _, attribute = FAMILIES[name].partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)
    return family


def require_model_of(family: Family, class_name: str, where: str) -> None:
    """Refuse a model directory of another family.

    Args:
        class_name: The pipeline class that its index names.
        where: The directory.

    Raises:
        ModelError: With the families that take such a model.
    """
    if class_name in (*family.models, family.pipeline):
        return
    others = (family_named(name) for name in FAMILIES)
    takers = [each.name for each in others if class_name in (*each.models, each.pipeline)]
    remedy = f"it is one of {' or '.join(takers)}" if takers else "no family here takes it"
    raise ModelError(
        f"model {where} is a {class_name}, but {family.name} takes {' or '.join(family.models)}; "
        f"{remedy}"
    )

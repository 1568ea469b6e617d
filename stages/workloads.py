"""What each component of a model does in each phase of a job: calls, operations, work in memory.

From configurations and shapes of weights alone. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.activations import (
    sequence_activation_bytes,
    unet_activation_bytes,
    vae_activation_bytes,
)
from stages.families import Family
from stages.forecast_records import Job
from stages.models import Component, ModelDirectory
from stages.operations import sequence_flops, unet_flops
from stages.size_rules import spatial_multiple, temporal_multiple, vae_scale
from stages.vae_operations import vae_flops

PHASES = ("encode", "condition", "denoise", "decode")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PIXELS_PER_PICTURE_TOKEN = 28**2  # of the text encoders that look at pictures
_PATCHES_PER_TOKEN = 4
_AUDIO_TOKENS_PER_S = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one component does in one phase.

    Attributes:
        num_calls: How often it is called for one picture or video.
        flops: Operations of a call.
        activation_bytes: Most that a call holds besides weights.
        dtype: What it computes in, by torch's name.
    """

    phase: str
    component: str
    num_calls: int
    flops: float
    activation_bytes: int
    dtype: str


def workloads(model: ModelDirectory, family: Family, job: Job) -> list[Workload]:
    """What every component that is loaded does, in the order of the phases."""
    work = _Work(model, family, job)
    found = [
        work.of(part, phase)
        for part in model.components.values()
        if part.weights is not None
        for phase in phases_of(part, family, job)
    ]
    return sorted(found, key=lambda each: PHASES.index(each.phase))


def is_denoiser(part: Component, family: Family) -> bool:
    """Whether it is the denoiser of a family, or the second of two."""
    return part.name in (family.denoiser, f"{family.denoiser}_2")


def phases_of(part: Component, family: Family, job: Job) -> tuple[str, ...]:
    """The phases that load a component with weights; none for one that this job does without."""
    if is_denoiser(part, family):
        return ("denoise",)
    if part.class_name.startswith(("Autoencoder", "VQModel")):
        starts = job.is_conditioned and "Audio" not in part.class_name
        return ("condition", "decode") if starts else ("decode",)
    if part.class_name.endswith("Vocoder") or part.name == "safety_checker":
        return ("decode",)
    if part.name == "image_encoder":
        return ("condition",) if job.is_conditioned else ()
    if part.name in family.optional and not part.name.startswith("text_encoder"):
        return ()
    return ("encode",)


@dataclass(frozen=True, slots=True)
class _Work:
    model: ModelDirectory
    family: Family
    job: Job

    def of(self, part: Component, phase: str) -> Workload:
        dtype = self.family.dtypes.get(part.name, self.job.dtype)
        calls, flops, nbytes = self._measures(part, phase, ITEM_BYTES[dtype])
        return Workload(
            phase=phase,
            component=part.name,
            num_calls=calls,
            flops=flops,
            activation_bytes=nbytes,
            dtype=dtype,
        )

    def _measures(self, part: Component, phase: str, item_bytes: int) -> tuple[int, float, int]:
        if phase == "denoise":
            return self._denoiser(part, item_bytes)
        if part.name == "vae":
            return self._vae(part, phase, item_bytes)
        if phase == "encode":
            return self._text_encoder(part, item_bytes)
        return self._picture_encoder(part, item_bytes)

    def _denoiser(self, part: Component, item_bytes: int) -> tuple[int, float, int]:
        # Guidance calls the module once more: it takes time, not memory.
        calls = self._steps_of(part) * (2 if self.job.is_guided else 1)
        shapes, text = part.tensor_shapes(), self.job.max_sequence_length
        vae, config = self._configs
        if "UNet" in part.class_name:
            text = self._limited(text)
            rows, columns = self._latent_edges
            flops = unet_flops(shapes, rows, columns, text)
            return calls, flops, unet_activation_bytes(shapes, rows, columns, item_bytes)
        tokens = self.job.height * self.job.width // spatial_multiple(vae, config) ** 2
        tokens *= self._latent_frames // _frames_per_patch(config)
        if self.job.task == "edit":
            tokens *= 1 + self.job.num_media
        audio = 0
        if self.family.sound and self.job.frame_rate:
            audio = round(_AUDIO_TOKENS_PER_S * self.job.num_frames / self.job.frame_rate)
        flops = sequence_flops(shapes, tokens, text, num_audio_tokens=audio)
        return calls, flops, sequence_activation_bytes(shapes, tokens + text, item_bytes)

    def _steps_of(self, part: Component) -> int:
        """All steps, or where two denoisers share them, those on this one's side."""
        steps, boundary = self.job.num_inference_steps, self.model.settings.get("boundary_ratio")
        if not isinstance(boundary, int | float):
            return steps
        scheduler = self.model.components.get("scheduler")
        config = scheduler.config() if scheduler is not None else {}
        shift = float(config.get("flow_shift") or config.get("shift") or 1.0)
        # The noise of step u of 1 is shift u / (1 + (shift - 1) u); solved for the boundary.
        share = boundary / (shift - boundary * (shift - 1))
        first = min(steps, round(steps * (1 - share)))
        return first if part.name == self.family.denoiser else steps - first

    def _vae(self, part: Component, phase: str, item_bytes: int) -> tuple[int, float, int]:
        config, job = part.config(), self.job
        config.setdefault("_class_name", part.class_name)
        encodes = phase == "condition"
        frames = job.num_frames if not encodes or part.class_name == "AutoencoderKLWan" else 1
        rows, columns = self._latent_edges
        patch = config.get("patch_size")
        flops = vae_flops(
            part.tensor_shapes(),
            rows,
            columns,
            scale=vae_scale(config),
            patch=patch if isinstance(patch, int) else 1,
            num_frames=frames,
            packed=temporal_multiple(config) if frames > 1 else 1,
            encodes=encodes,
        )
        work = vae_activation_bytes(config, job.height, job.width, item_bytes, num_frames=frames)
        return max(1, job.num_media) if encodes else 1, flops, work

    def _text_encoder(self, part: Component, item_bytes: int) -> tuple[int, float, int]:
        config, tokens, patches = part.config(), self.job.max_sequence_length, 0
        inner = config.get("text_config")
        config = config | inner if isinstance(inner, dict) else config
        tokens = self._limited(tokens, config)
        if self.job.task == "edit" and "VL" in part.class_name:
            area = self.job.height * self.job.width * self.job.num_media
            patches = area // _PIXELS_PER_PICTURE_TOKEN * _PATCHES_PER_TOKEN
            tokens += patches // _PATCHES_PER_TOKEN
        shapes = part.tensor_shapes()
        num_layers = config.get("num_hidden_layers")
        kept = num_layers if isinstance(num_layers, int) else 0
        flops = sequence_flops(shapes, tokens, num_patches=patches)
        work = sequence_activation_bytes(shapes, tokens, item_bytes, num_kept_states=kept)
        return 2 if self.job.encodes_negative else 1, flops, work

    def _picture_encoder(self, part: Component, item_bytes: int) -> tuple[int, float, int]:
        """What looks at a picture of a fixed size; sound is told by the size of its weights."""
        config, shapes = part.config(), part.tensor_shapes()
        inner = config.get("vision_config")
        config = config | inner if isinstance(inner, dict) else config
        size, patch = config.get("image_size"), config.get("patch_size")
        tokens = (size // patch) ** 2 if isinstance(size, int) and isinstance(patch, int) else 1
        flops = sequence_flops(shapes, tokens, num_patches=tokens)
        return 1, flops, sequence_activation_bytes(shapes, tokens, item_bytes)

    def _limited(self, tokens: int, config: dict[str, Any] | None = None) -> int:
        """Tokens that a text encoder reads, or those of the longest text that CLIP reads."""
        if config is None:
            return min(tokens, 77)
        most = config.get("max_position_embeddings")
        return min(tokens, most) if isinstance(most, int) and most > 0 else tokens

    @property
    def _configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = self.model.components
        return parts["vae"].config(), parts[self.family.denoiser].config()

    @property
    def _latent_edges(self) -> tuple[int, int]:
        scale = vae_scale(self._configs[0])
        return self.job.height // scale, self.job.width // scale

    @property
    def _latent_frames(self) -> int:
        if self.job.num_frames == 1:
            return 1
        return (self.job.num_frames - 1) // temporal_multiple(self._configs[0]) + 1


def _frames_per_patch(config: dict[str, Any]) -> int:
    size: Any = config.get("patch_size_t")
    if size is None and isinstance(sizes := config.get("patch_size"), list) and len(sizes) == 3:
        size = sizes[0]
    return size if isinstance(size, int) and size > 0 else 1

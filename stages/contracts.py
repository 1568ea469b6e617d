"""What crosses the border of a stage process: small frozen records, and nothing else.

This module loads no torch: the flow process builds requests and reads results with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

DIGEST_PATTERN = r"^[0-9a-f]{64}$"
MAX_SEED = 2**64 - 1

DEFAULT_CHECKPOINT_EVERY_S = 60.0
"""Long enough that a quick picture writes none, short enough that little is lost."""

HANDOVER_SCHEMA = "exeunt.handover/1"
METADATA_KEY = "exeunt"
"""The entry of a safetensors file's metadata under which a handover's document stands."""

MEDIA_STAGE = "media"
"""What stands as the stage of an artifact that the user gave: an argument, no stage's result."""

Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
StageName = Literal["inspect", "encode", "condition", "denoise", "decode"]
OffloadPreset = Literal["auto", "resident", "stream", "low_memory", "group", "off"]


def canonical_json(value: JsonValue) -> bytes:
    """One byte string per value: sorted keys, no spaces, ASCII, no NaN, no negative zero.

    Raises:
        ValueError: `value` holds a NaN or an infinity.
        TypeError: `value` holds something that is not plain JSON.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be part of a request; use a finite number")
        return value + 0.0  # -0.0 and 0.0 ask for the same thing
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is {type(key).__name__}, not text")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be part of a request; use plain JSON values")


def json_digest(value: JsonValue) -> str:
    """The sha256 of a value's canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Record(BaseModel):
    """A frozen record with no room for unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(Record):
    """Names an artifact by what it holds, never by where it lies.

    Attributes:
        digest: sha256 of the content, 64 hex digits.
        size: Bytes.
        media_type: `application/vnd.safetensors`, `image/png`, `video/mp4`, `application/json`.
    """

    digest: Digest
    size: int = Field(ge=0)
    media_type: str = "application/vnd.safetensors"


class StageResult(Record):
    """What a stage hands to the next one: references only, under 1 kB."""

    stage: str
    artifacts: dict[str, ArtifactRef]

    def only(self) -> ArtifactRef:
        """The one artifact of a stage that makes one."""
        (ref,) = self.artifacts.values()
        return ref


class AdapterUse(Record):
    """A LoRA file that a stage's models wear.

    Attributes:
        digest: sha256 of the file.
        scale: What its part is multiplied by before it is added; any finite number.
        target: The component that wears it, where several could; empty: as its names say.
    """

    digest: Digest
    scale: float = Field(default=1.0, allow_inf_nan=False)
    target: str = ""


class StageRequest(Record):
    """All that determines the bytes of a stage's output, and nothing else.

    Attributes:
        stage: Which stage runs.
        code_version: Raised by hand when the stage's output changes for equal inputs.
        family: Name of the model family's declaration, such as `z-image`.
        task: The family's task, such as `text-to-image`; it fixes which blocks run.
        libraries: Versions of the libraries that define the mathematics.
        components: Fingerprint of each component whose weights this stage loads.
        configs: Digest of the configuration of every component of the model: absent
            models still lend their geometry to the phases that do not load them.
        inputs: Upstream artifacts by role, such as `embeds` or `latents`.
        dtype: Compute dtype by torch name, such as `bfloat16`.
        options: The pipeline's own arguments for this phase, as plain JSON.
        adapters: What the components of this stage wear, in the order in which it is added.
        blocks: Digest of the reviewed custom blocks that run, by the name of the block in whose
            place they do.
        seed: Seed of the CPU generator, 0 to 2**64 - 1; None where nothing is drawn.
        label: For people; not part of the digest.
    """

    stage: StageName
    code_version: str
    family: str
    task: str
    libraries: dict[str, str] = Field(default_factory=dict)
    components: dict[str, Digest] = Field(default_factory=dict)
    configs: dict[str, Digest] = Field(default_factory=dict)
    inputs: dict[str, ArtifactRef] = Field(default_factory=dict)
    dtype: str
    options: dict[str, JsonValue] = Field(default_factory=dict)
    adapters: tuple[AdapterUse, ...] = ()
    blocks: dict[str, Digest] = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    label: str = Field(default="", exclude=True)

    @field_validator("options")
    @classmethod
    def _options_are_plain(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        canonical_json(options)
        return options

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Results from before there were these fields are found all the same."""
        document: dict[str, Any] = dump(self)
        unused = [name for name in ("adapters", "blocks") if not document.get(name)]
        return {name: value for name, value in document.items() if name not in unused}

    @property
    def digest(self) -> str:
        """The cache key: sha256 of the request's canonical JSON, without its label."""
        return json_digest(self.model_dump(mode="json"))


class OffloadChoice(Record):
    """How a stage's models share the device with their work; no bit of a result depends on it.

    The fields are those of `ddo.OffloadSettings`, which checks them in `stages.offload_rules`.

    Attributes:
        preset: `auto` streams weights only if they do not fit.
        device_budget: Bytes of device memory for weights and work; None: what is free.
        host_budget: Bytes of host memory that may be pinned; None: a share of what is left.
        reserve: Bytes of the device budget that are left to the work; None: a share of it.
        link_rate: Bytes per second to the device; None: measured.
    """

    preset: OffloadPreset = "auto"
    device_budget: int | None = Field(default=None, ge=1)
    host_budget: int | None = Field(default=None, ge=1)
    reserve: int | None = Field(default=None, ge=1)
    link_rate: int | None = Field(default=None, ge=1)


class StageContext(Record):
    """Where and how a request runs; none of it may change a bit of the result.

    Attributes:
        model_dir: The model directory in diffusers layout, absolute.
        store_url: Where artifacts are read and written.
        home_dir: Where remembered fingerprints and locks lie, absolute.
        sources: Folder or file of each component that does not lie in the model directory.
        adapters: Path of each LoRA file that a request may name, by its digest.
        device: `cpu`, `cuda` or `cuda:N`.
        num_threads: CPU threads of this stage; None leaves torch's own choice.
        on_truncate: Whether a prompt longer than its encoder reads is an error.
        offload: How models that the device does not hold are streamed to it.
        checkpoint_every_steps: Denoising steps between two checkpoints; None: only by time.
        checkpoint_every_s: Seconds between two checkpoints; None: only by steps. With neither,
            none is written and none is used.
        preview_every_steps: Denoising steps between two previews; None makes none.
        preview_dir: Folder for them, absolute; the picture of a request is replaced by its next.
        run_id: Names the run in logs and reports.
        fallbacks: What was tried before and failed, in sentences; for the report.
    """

    model_dir: str
    store_url: str
    home_dir: str
    sources: dict[str, str] = Field(default_factory=dict)
    adapters: dict[str, str] = Field(default_factory=dict)
    device: str = "cpu"
    num_threads: int | None = Field(default=None, ge=1)
    on_truncate: Literal["warn", "error"] = "warn"
    offload: OffloadChoice = OffloadChoice()
    checkpoint_every_steps: int | None = Field(default=None, ge=1)
    checkpoint_every_s: float | None = Field(default=DEFAULT_CHECKPOINT_EVERY_S, gt=0)
    preview_every_steps: int | None = Field(default=None, ge=1)
    preview_dir: str = ""
    run_id: str = ""
    fallbacks: tuple[str, ...] = ()

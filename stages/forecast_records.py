"""Records of a forecast: what is asked, how fast the machine is, what is to be expected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "exeunt.forecast/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a machine is; None: not measured.

    Attributes:
        link_bytes_per_s: From pinned host memory to the device.
        flops_per_s: Of matrix products on the device.
        disk_bytes_per_s: Reading a file that is not in memory.
        device_bytes: Memory of the device.
        source: Where the figures come from, for people.
    """

    link_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    disk_bytes_per_s: float | None = None
    device_bytes: int | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work that a forecast is for.

    Attributes:
        height: Pixels.
        width: Pixels.
        num_inference_steps: Denoising steps.
        is_guided: Whether every step is computed twice.
        max_sequence_length: Tokens of the prompt.
        dtype: Compute dtype by torch's name.
        family: By its declaration's name.
        task: The family's task.
        num_media: Pictures that it starts from.
        num_frames: Of a video; 1 for a picture.
        frame_rate: Frames a second; 0 for a picture.
        encodes_negative: Whether a negative prompt is encoded, too.
    """

    height: int
    width: int
    num_inference_steps: int
    is_guided: bool
    max_sequence_length: int
    dtype: str
    family: str = ""
    task: str = ""
    num_media: int = 0
    num_frames: int = 1
    frame_rate: float = 0.0
    encodes_negative: bool = False

    @property
    def is_conditioned(self) -> bool:
        """Whether it starts from pictures or a video, which a condition phase reads."""
        return self.num_media > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentForecast:
    """One component in its phase. Amounts are bytes and seconds; None: not known.

    Attributes:
        num_steps: Calls.
        disk_bytes: Size of the weights on disk.
        read_s: Reading the weights when they are not in memory.
        mode: `resident` or `stream`; empty if no plan fits.
        device_bytes: Most device memory at a time: weights, ring and activations.
        weights_on_device_bytes: Weights and ring.
        activation_bytes: Estimate of the module's own work.
        pinned_bytes: Host memory that is pinned; with mapped files it is page cache.
        staged_bytes: Weights that no pinned memory is left for: each call copies them through a
            small pinned ring.
        anonymous_bytes: Host memory for weights whose dtype is converted.
        step_s: One call of the module.
        elapsed_s: All calls, and the first copy of what stays.
        problem: Why the budget does not hold it; empty if it does.
    """

    phase: str
    component: str
    num_steps: int
    disk_bytes: int
    read_s: float | None
    mode: str = ""
    device_bytes: int = 0
    weights_on_device_bytes: int = 0
    activation_bytes: int = 0
    pinned_bytes: int = 0
    staged_bytes: int = 0
    anonymous_bytes: int = 0
    step_s: float | None = None
    elapsed_s: float | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether the budget holds it."""
        return not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecast:
    """All components of a model, in the order of their phases, and what the numbers rest on.

    Attributes:
        device_budget: Bytes; None: nothing said how large the device is.
    """

    model: str
    job: Job
    preset: str
    device_budget: int | None
    components: tuple[ComponentForecast, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return all(each.fits for each in self.components)

    @property
    def elapsed_s(self) -> float | None:
        """Computation and copies of one picture or video; None if any is not known."""
        times = [each.elapsed_s for each in self.components]
        return sum(t for t in times if t is not None) if None not in times else None

    def run_s(self, num_prompts: int, num_outputs: int) -> float | None:
        """All pictures of a run, each prompt encoded once; None if any time is not known."""
        if self.elapsed_s is None:
            return None
        times = {"encode": num_prompts}
        return sum(
            (each.elapsed_s or 0.0) * times.get(each.phase, num_outputs) for each in self.components
        )

    @property
    def device_bytes(self) -> int:
        """Most device memory at a time: phases come one after the other."""
        phases: dict[str, int] = {}
        for each in self.components:
            phases[each.phase] = phases.get(each.phase, 0) + each.device_bytes
        return max(phases.values(), default=0)

    def to_json(self) -> dict[str, Any]:
        """A JSON document that names its schema."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "components": [{**asdict(each), "fits": each.fits} for each in self.components],
            "fits": self.fits,
            "elapsed_s": self.elapsed_s,
            "device_bytes": self.device_bytes,
        }

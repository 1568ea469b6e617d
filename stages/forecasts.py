"""What a run of a model would need, phase by phase, from configurations and headers alone.

Loads no torch and reads no weight. Rates that were not measured are assumptions, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddo.errors import DdoError
from ddo.forecasting import DEFAULT_LINK_BYTES_PER_S, forecast
from ddo.planning import PlanError
from ddo.settings import OffloadSettings
from ddo.sizes import show_nbytes
from stages import rules
from stages.contracts import OffloadChoice
from stages.errors import ModelError, RequestError
from stages.families import FAMILIES, Family, family_named
from stages.forecast_records import ComponentForecast, Job, ModelForecast, Rates
from stages.models import Component, ModelDirectory, open_model
from stages.offload_rules import choose_offload
from stages.size_rules import trained_edge
from stages.workloads import Workload, is_denoiser, workloads

ASSUMED_FLOPS_PER_S = 100e12  # matrix products in half precision on a card of the middle
ASSUMED_STAGING_BYTES_PER_S = 8e9  # from the page cache through a pinned ring
ASSUMED_TOKENS = 512
_WITHOUT_LIMIT = 1 << 50  # bytes: what a device without a given size is planned with
_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def forecast_model(
    directory: str | Path,
    *,
    family: str = "",
    task: str = "",
    height: int | None = None,
    width: int | None = None,
    num_frames: int = 1,
    frame_rate: float = 0.0,
    num_media: int = 0,
    num_inference_steps: int = 8,
    guidance_scale: float = 1.0,
    max_sequence_length: int = ASSUMED_TOKENS,
    encodes_negative: bool | None = None,
    dtype: str = "auto",
    choice: OffloadChoice | None = None,
    rates: Rates | None = None,
    sources: Mapping[str, Path] | None = None,
) -> ModelForecast:
    """Forecast one picture or video of a model.

    Args:
        family: By its declaration's name; by default the first that takes such a model.
        task: The family's task; by default its first.
        height: Pixels; None: what the model was trained at.
        num_frames: Frames of a video; 1 for a picture.
        frame_rate: Frames a second; it tells how much sound a video has.
        num_media: Pictures that it starts from; 0: there is no condition phase.
        num_inference_steps: Steps that are really computed.
        guidance_scale: The largest of all guiders'; over 1 computes every step twice.
        encodes_negative: Whether a negative prompt is encoded; by default if it is guided.
        choice: Preset and budgets; None: what the `DDO_*` variables say.
        sources: Components from elsewhere, as for `open_model`.

    Raises:
        ModelError: The directory is no whole model.
        RequestError: A size or setting cannot be used.
    """
    model = open_model(directory, sources=sources)
    if single := [part.name for part in model.components.values() if part.single_file]:
        raise RequestError(
            f"component {single[0]!r} comes from a single file, which is not forecast; give it as "
            "a folder"
        )
    choice, rates = choice or choose_offload(), rates or Rates()
    if choice.preset in ("group", "off"):
        raise RequestError(
            f"offload is {choice.preset!r}, which plans nothing; choose auto, resident, stream or "
            "low_memory"
        )
    declared = family_named(family) if family else _family_of(model)
    denoiser = _denoiser(model, declared)
    vae, config = _vae(model).config(), denoiser.config()
    sized_by = config if declared.sized_by == declared.denoiser else vae
    side = trained_edge(vae, sized_by, declared.edge)
    height, width = rules.check_size(
        side if height is None else height,
        side if width is None else width,
        rules.spatial_multiple(vae, config),
    )
    is_guided = bool(declared.guidance) and rules.check_guidance(guidance_scale) > 1
    job = Job(
        family=declared.name,
        task=task or next(iter(declared.tasks)),
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        num_media=num_media,
        num_inference_steps=rules.check_steps(num_inference_steps),
        is_guided=is_guided,
        encodes_negative=is_guided if encodes_negative is None else encodes_negative,
        max_sequence_length=rules.check_token_limit(max_sequence_length, 1 << 20),
        dtype=rules.check_dtype(dtype, denoiser.file_dtype),
    )
    budget = choice.device_budget or rates.device_bytes
    planner = _Planner(choice, rates, budget)
    found = [
        planner.plan(model.components[each.component], each)
        for each in workloads(model, declared, job)
    ]
    staged = any(each.staged_bytes for each in found)
    return ModelForecast(
        model=str(model.directory),
        job=job,
        preset=choice.preset,
        device_budget=budget,
        components=tuple(found),
        notes=tuple(planner.notes(is_staged=staged, has_sound=bool(declared.sound))),
    )


def _family_of(model: ModelDirectory) -> Family:
    for name in FAMILIES:
        family = family_named(name)
        if model.class_name in (*family.models, family.pipeline):
            return family
    raise ModelError(
        f"model {model.directory} is a {model.class_name}, which no family here takes; "
        "`exeunt --help` lists the families"
    )


def _denoiser(model: ModelDirectory, family: Family) -> Component:
    for part in model.components.values():
        if part.weights is not None and is_denoiser(part, family):
            return part
    raise ModelError(
        f"no {family.denoiser} with weights in {model.directory}; a forecast needs one"
    )


def _vae(model: ModelDirectory) -> Component:
    part = model.components.get("vae")
    if part is None or part.weights is None:
        raise ModelError(f"no VAE with weights in {model.directory}; a forecast needs one")
    return part


@dataclass(frozen=True, slots=True)
class _Planner:
    choice: OffloadChoice
    rates: Rates
    budget: int | None

    @property
    def link(self) -> float:
        return float(
            self.choice.link_rate or self.rates.link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S
        )

    @property
    def flops(self) -> float:
        return self.rates.flops_per_s or ASSUMED_FLOPS_PER_S

    def plan(self, part: Component, work: Workload) -> ComponentForecast:
        budget = self.budget or _WITHOUT_LIMIT
        settings = OffloadSettings(
            **self.choice.model_dump()
            | {"device_budget": budget, "link_rate": max(1, int(self.link))}
        )
        common: dict[str, Any] = {
            "phase": work.phase,
            "component": part.name,
            "num_steps": work.num_calls,
            "disk_bytes": part.nbytes,
            "read_s": part.nbytes / d if (d := self.rates.disk_bytes_per_s) else None,
        }
        num_parameters = sum(math.prod(shape) for shape in part.tensor_shapes().values())
        try:
            found = forecast(
                part.directory,
                settings,
                # So many tokens through every weight are as many operations.
                num_tokens=max(1, round(work.flops / (2 * num_parameters))),
                num_steps=work.num_calls,
                flops_per_s=self.flops,
                variant=part.variant,
                dtype=_FORMAT_NAMES[work.dtype],
            )
        except PlanError as error:
            return ComponentForecast(**common, problem=str(error))
        except DdoError as error:
            raise ModelError(f"component {part.name!r}: {error}") from error
        plan = found.plan
        peak = plan.device_bytes + work.activation_bytes
        staged = max(0, plan.streamed_bytes - found.host_budget_bytes)
        step_s = self._with_staging(found.step_s or 0.0, plan.streamed_bytes, staged)
        problem = ""
        if peak > budget:
            problem = (
                f"{show_nbytes(plan.device_bytes)} of weights and about "
                f"{show_nbytes(work.activation_bytes)} of work exceed the device budget of "
                f"{show_nbytes(budget)}; raise device_budget, or reserve, which leaves less to "
                "weights"
            )
        # What is resident is copied once; its pages are let go afterwards.
        return ComponentForecast(
            **common,
            mode=plan.mode,
            anonymous_bytes=found.converted_bytes,
            device_bytes=peak,
            weights_on_device_bytes=plan.device_bytes,
            activation_bytes=work.activation_bytes,
            pinned_bytes=found.pinned_bytes,
            staged_bytes=staged,
            step_s=step_s,
            elapsed_s=plan.resident_bytes / self.link + step_s * work.num_calls,
            problem=problem,
        )

    def _with_staging(self, step_s: float, streamed: int, staged: int) -> float:
        """A step whose weights do not all come from pinned memory, in seconds."""
        if not staged:
            return step_s
        staging = min(ASSUMED_STAGING_BYTES_PER_S, self.link)
        return max(step_s, (streamed - staged) / self.link + staged / staging)

    def notes(self, *, is_staged: bool, has_sound: bool) -> list[str]:
        """What the numbers rest on."""
        found = []
        if self.budget is None:
            found.append("no device budget was given: every model is planned to stay whole")
        elif not self.choice.device_budget:
            found.append(f"device budget is the memory of the device ({self.rates.source})")
        for name, said, measured, used, unit in (
            ("link", self.choice.link_rate, self.rates.link_bytes_per_s, self.link / 1e9, "GB/s"),
            ("computation", None, self.rates.flops_per_s, self.flops / 1e12, "TFLOP/s"),
        ):
            if said:
                found.append(f"{name}: {used:.3g} {unit}, as given")
            elif measured:
                found.append(f"{name}: {used:.3g} {unit} ({self.rates.source})")
            else:
                found.append(
                    f"{name}: {used:.3g} {unit} is assumed; `exeunt doctor` measures it on the "
                    "machine with the GPU"
                )
        if is_staged:
            found.append(
                f"weights beyond the host budget: {ASSUMED_STAGING_BYTES_PER_S / 1e9:.3g} GB/s is "
                "assumed, from the page cache through a pinned ring"
            )
        if has_sound:
            found.append("decoding sound is left out: it is small beside the video")
        found.append("activations are estimates; libraries and the CUDA context come on top")
        found.append("times leave out the start of processes and reading from disk")
        return found

"""What a run of a model would need, phase by phase, from configurations and headers alone.

Loads no torch and reads no weight. Rates that were not measured are assumptions, and said so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddo.errors import DdoError
from ddo.forecasting import DEFAULT_LINK_BYTES_PER_S, forecast
from ddo.planning import PlanError
from ddo.settings import OffloadSettings
from ddo.sizes import show_nbytes
from stages import rules
from stages.activations import (
    decoder_activation_bytes,
    decoder_flops,
    sequence_activation_bytes,
)
from stages.contracts import OffloadChoice
from stages.errors import ModelError, RequestError
from stages.forecast_records import ComponentForecast, Job, ModelForecast, Rates
from stages.models import Component, ModelDirectory, open_model
from stages.offload_rules import choose_offload

ASSUMED_FLOPS_PER_S = 100e12  # matrix products in half precision on a card of the middle
ASSUMED_TOKENS = 512
_WITHOUT_LIMIT = 1 << 50  # bytes: what a device without a given size is planned with
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def forecast_model(
    directory: str | Path,
    *,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 8,
    guidance_scale: float = 1.0,
    max_sequence_length: int = ASSUMED_TOKENS,
    dtype: str = "auto",
    choice: OffloadChoice | None = None,
    rates: Rates | None = None,
) -> ModelForecast:
    """Forecast one picture of a model.

    Args:
        height: Pixels; None: what the VAE was trained at.
        choice: Preset and budgets; None: what the `DDO_*` variables say.

    Raises:
        ModelError: The directory is no whole model.
        RequestError: A size or setting cannot be used.
    """
    model = open_model(directory)
    choice, rates = choice or choose_offload(), rates or Rates()
    if choice.preset in ("group", "off"):
        raise RequestError(
            f"offload is {choice.preset!r}, which plans nothing; choose auto, resident, stream or "
            "low_memory"
        )
    vae, denoiser = _geometry(model)
    multiple = rules.spatial_multiple(vae, denoiser)
    side = int(vae.get("sample_size") or 1024)
    height, width = rules.check_size(
        side if height is None else height, side if width is None else width, multiple
    )
    job = Job(
        height=height,
        width=width,
        num_inference_steps=rules.check_steps(num_inference_steps),
        is_guided=rules.check_guidance(guidance_scale) > 1,
        max_sequence_length=rules.check_token_limit(max_sequence_length, 1 << 20),
        dtype=rules.check_dtype(dtype, _denoiser(model).file_dtype),
    )
    budget = choice.device_budget or rates.device_bytes
    planner = _Planner(job, choice, rates, budget, multiple, rules.vae_scale(vae))
    parts = [part for part in model.components.values() if part.weights is not None]
    found = [planner.component(part) for part in sorted(parts, key=_phase_number)]
    return ModelForecast(
        model=str(model.directory),
        job=job,
        preset=choice.preset,
        device_budget=budget,
        components=tuple(found),
        notes=tuple(planner.notes()),
    )


PHASES = ("encode", "denoise", "decode")


def phase_of(part: Component) -> str:
    """The phase that loads a component for text-to-image, by its class."""
    if any(kind in part.class_name for kind in ("Transformer", "UNet")) and (
        part.library == "diffusers"
    ):
        return "denoise"
    return "decode" if part.class_name.startswith(("Autoencoder", "VQModel")) else "encode"


def _phase_number(part: Component) -> int:
    return PHASES.index(phase_of(part))


def _denoiser(model: ModelDirectory) -> Component:
    for part in model.components.values():
        if part.weights is not None and phase_of(part) == "denoise":
            return part
    raise ModelError(
        f"no transformer or UNet with weights in {model.directory}; a forecast needs one"
    )


def _geometry(model: ModelDirectory) -> tuple[dict[str, Any], dict[str, Any]]:
    for part in model.components.values():
        if part.weights is not None and phase_of(part) == "decode":
            return part.config(), _denoiser(model).config()
    raise ModelError(f"no VAE with weights in {model.directory}; a forecast needs one")


@dataclass(frozen=True, slots=True)
class _Planner:
    job: Job
    choice: OffloadChoice
    rates: Rates
    budget: int | None
    multiple: int
    scale: int

    @property
    def link(self) -> float:
        return float(
            self.choice.link_rate or self.rates.link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S
        )

    @property
    def flops(self) -> float:
        return self.rates.flops_per_s or ASSUMED_FLOPS_PER_S

    def component(self, part: Component) -> ComponentForecast:
        phase, shapes = phase_of(part), part.tensor_shapes()
        item_bytes = _ITEM_BYTES[self.job.dtype]
        # Guidance calls a module once more: it takes time, not memory.
        passes = 2 if self.job.is_guided else 1
        if phase == "decode":
            rows, columns = self.job.height // self.scale, self.job.width // self.scale
            num_parameters = sum(math.prod(shape) for shape in shapes.values())
            tokens = max(1, round(decoder_flops(shapes, rows, columns) / (2 * num_parameters)))
            work = decoder_activation_bytes(
                part.config(), self.job.height, self.job.width, item_bytes
            )
            return self._plan(part, phase, tokens, 1, work)
        tokens = self.job.max_sequence_length
        if phase == "denoise":
            tokens += self.job.height * self.job.width // self.multiple**2
            work = sequence_activation_bytes(shapes, tokens, item_bytes)
            return self._plan(part, phase, tokens, self.job.num_inference_steps * passes, work)
        num_layers = part.config().get("num_hidden_layers")
        kept = num_layers if isinstance(num_layers, int) else 0
        work = sequence_activation_bytes(shapes, tokens, item_bytes, num_kept_states=kept)
        return self._plan(part, phase, tokens, passes, work)

    def _plan(
        self, part: Component, phase: str, tokens: int, num_steps: int, work: int
    ) -> ComponentForecast:
        budget = self.budget or _WITHOUT_LIMIT
        settings = OffloadSettings(
            **self.choice.model_dump()
            | {"device_budget": budget, "link_rate": max(1, int(self.link))}
        )
        weights = part.nbytes
        common: dict[str, Any] = {
            "phase": phase,
            "component": part.name,
            "num_steps": num_steps,
            "disk_bytes": weights,
            "read_s": weights / d if (d := self.rates.disk_bytes_per_s) else None,
        }
        try:
            found = forecast(
                part.directory,
                settings,
                num_tokens=tokens,
                num_steps=num_steps,
                flops_per_s=self.flops,
                variant=part.variant,
                dtype=_FORMAT_NAMES[self.job.dtype],
            )
        except PlanError as error:
            return ComponentForecast(**common, problem=str(error))
        except DdoError as error:
            raise ModelError(f"component {part.name!r}: {error}") from error
        plan = found.plan
        peak = plan.device_bytes + work
        first_copy_s = plan.resident_bytes / self.link
        steps_s = (found.step_s or 0.0) * num_steps
        problem = ""
        if peak > budget:
            problem = (
                f"{show_nbytes(plan.device_bytes)} of weights and about {show_nbytes(work)} of "
                f"work exceed the device budget of {show_nbytes(budget)}; raise device_budget, or "
                "reserve, which leaves less to weights"
            )
        # What is resident is copied once; its pages are let go afterwards.
        return ComponentForecast(
            **common,
            mode=plan.mode,
            anonymous_bytes=found.converted_bytes,
            device_bytes=peak,
            weights_on_device_bytes=plan.device_bytes,
            activation_bytes=work,
            pinned_bytes=found.pinned_bytes,
            step_s=found.step_s,
            elapsed_s=first_copy_s + steps_s,
            problem=problem,
        )

    def notes(self) -> list[str]:
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
        found.append("activations are estimates; libraries and the CUDA context come on top")
        found.append("times leave out the start of processes and reading from disk")
        return found

"""What a model would need, from the headers of its files alone. Loads no torch, reads no weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddo.host_memory import pinnable_bytes
from ddo.planning import BlockSpec, OffloadPlan, plan
from ddo.settings import OffloadSettings, SettingsError
from ddo.sizes import show_nbytes
from ddo.weight_files import DTYPE_BITS, StoredTensor, WeightFiles, read_weight_files

SCHEMA = 1
DEFAULT_LINK_BYTES_PER_S = 25e9
"""A PCIe 4 x16 link with pinned memory; give your own, `exeunt doctor` measures it."""

# Of a layer that turns `n` features into `m`: its input, its output, and a copy of either that
# an activation function or a residual sum makes.
_LIVE_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of one component. Amounts are bytes and seconds; None: not known.

    Attributes:
        directory: Where its weights lie.
        plan: What would stay and what would stream.
        weight_bytes: All weights, as the device holds them.
        converted_bytes: Anonymous host memory for weights whose dtype is converted.
        num_parameters: Elements of all weights.
        activation_bytes: Estimate of the largest layer's inputs and outputs.
        peak_device_bytes: Weights and ring by the plan, and activations.
        pinned_bytes: Host memory to be pinned, within the host budget.
        host_budget_bytes: What may be pinned.
        step_s: Predicted time of one step.
        denoise_s: Predicted time of all steps.
        fits: Whether the device budget holds the peak.
        notes: What the numbers rest on.
        schema: Of this record.
    """

    directory: str
    plan: OffloadPlan
    weight_bytes: int
    converted_bytes: int
    num_parameters: int
    activation_bytes: int
    peak_device_bytes: int
    pinned_bytes: int
    host_budget_bytes: int
    step_s: float | None
    denoise_s: float | None
    fits: bool
    notes: tuple[str, ...]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """A JSON document that names its schema."""
        return {**asdict(self), "plan": self.plan.to_json()}


def forecast(
    directory: str | Path,
    settings: OffloadSettings,
    *,
    num_tokens: int,
    batch_size: int = 1,
    num_steps: int = 1,
    flops_per_s: float | None = None,
    variant: str | None = None,
    dtype: str | None = None,
) -> Forecast:
    """Predict memory and time of one component's steps.

    Args:
        directory: A component's folder, or one safetensors file.
        settings: `device_budget` has to be set: there may be no device here to ask.
        num_tokens: Length of the sequence that its layers see: latent patches plus text.
        num_steps: Calls of the module.
        flops_per_s: Rate of matrix products on the device. None leaves computation open: the
            plan then assumes that it balances the copies.
        dtype: What floats of 16 bits and more are converted to when the module is loaded, by the
            format's name, such as `BF16`. None keeps the files'.

    Raises:
        SettingsError: `device_budget` is not set.
        SourceError: The weights are missing or damaged.
        PlanError: The budget is too small for any plan; the message says what would do.
    """
    budget = settings.device_budget_bytes
    if budget is None:
        raise SettingsError("device_budget is not set; a forecast needs such as '12GiB'")
    files = read_weight_files(directory, variant)
    specs = header_blocks(files, dtype)
    tokens = num_tokens * batch_size
    num_parameters = sum(math.prod(tensor.shape) for tensor in files.tensors.values())
    compute_s = None
    if flops_per_s is not None:
        compute_s = 2.0 * num_parameters * tokens / flops_per_s
    found = plan(
        specs,
        settings,
        weight_budget_bytes=settings.weight_budget_bytes(budget),
        link_bytes_per_s=settings.link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S,
        compute_s=compute_s,
    )
    activations = _activation_bytes(files.tensors.values(), tokens, dtype)
    sizes = {tensor.name: _nbytes(tensor, dtype) for tensor in files.tensors.values()}
    weight_bytes = sum(sizes.values())
    host = pinnable_bytes(settings.host_budget_bytes)
    step_s = found.step_s if compute_s is not None else None
    peak = found.device_bytes + activations
    return Forecast(
        directory=str(directory),
        plan=found,
        weight_bytes=weight_bytes,
        converted_bytes=sum(sizes[t.name] for t in files.tensors.values() if _changes(t, dtype)),
        num_parameters=num_parameters,
        activation_bytes=activations,
        peak_device_bytes=peak,
        pinned_bytes=min(weight_bytes, host),
        host_budget_bytes=host,
        step_s=step_s,
        denoise_s=step_s * num_steps if step_s is not None else None,
        fits=peak <= budget,
        notes=_notes(files, settings, host, flops_per_s),
    )


def header_blocks(files: WeightFiles, dtype: str | None = None) -> list[BlockSpec]:
    """Blocks as a module's layers would make them, from the names of its weights.

    Args:
        dtype: As for `forecast`.
    """
    sizes: dict[str, int] = {}
    for tensor in files.tensors.values():
        layer = tensor.name.rpartition(".")[0] or tensor.name
        sizes[layer] = sizes.get(layer, 0) + -(-_nbytes(tensor, dtype) // 256) * 256
    return [
        BlockSpec(name=name, nbytes=sizes[name], compute_weight=float(sizes[name]))
        for name in sorted(sizes, key=_natural)
    ]


_CONVERTED = {"F64", "F32", "BF16", "F16"}


def _changes(tensor: StoredTensor, dtype: str | None) -> bool:
    return dtype is not None and tensor.dtype in _CONVERTED and tensor.dtype != dtype


def _nbytes(tensor: StoredTensor, dtype: str | None) -> int:
    if dtype is None or not _changes(tensor, dtype):
        return tensor.nbytes
    return math.prod(tensor.shape) * DTYPE_BITS[dtype] // 8


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _activation_bytes(tensors: Iterable[StoredTensor], num_tokens: int, dtype: str | None) -> int:
    widest = 0
    for tensor in tensors:
        if len(tensor.shape) == 2:
            kept = dtype if dtype is not None and _changes(tensor, dtype) else tensor.dtype
            widest = max(widest, sum(tensor.shape) * DTYPE_BITS[kept] // 8)
    return _LIVE_COPIES * widest * num_tokens


def _notes(
    files: WeightFiles, settings: OffloadSettings, host: int, flops_per_s: float | None
) -> tuple[str, ...]:
    notes = ["activations are estimated from the widest layer, computation from its weights alone"]
    if settings.link_rate is None:
        notes.append(f"link rate is assumed: {DEFAULT_LINK_BYTES_PER_S / 1e9:.0f} GB/s")
    if flops_per_s is None:
        notes.append("no rate of computation was given: times of steps are left open")
    if files.nbytes > host:
        notes.append(
            f"host budget pins {show_nbytes(host)} of {show_nbytes(files.nbytes)}: the rest is "
            "read through a pinned ring at each step, as fast as the host copies memory"
        )
    if files.ignored:
        names = ", ".join(path.name for path in files.ignored)
        notes.append(f"not read, since no index names them: {names}")
    return tuple(notes)

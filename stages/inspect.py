"""Inspect: what a model's phases load and take, with its weight files held to its configuration.

Runs once a model, before any weights load: every model is built on the meta device from its
configuration, and each tensor it expects has to stand in the headers of its weight files with
the same shape. The manifest that comes out is how the flow, which has no torch, knows which
fingerprints belong in which request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stages.adapter_check import check_adapter
from stages.adapters import adapter_file
from stages.components import component_names, prepare
from stages.contracts import StageContext, StageRequest, StageResult, canonical_json
from stages.errors import ModelError
from stages.execute import Events, Job, finish, open_job
from stages.manifest import ADAPTER_ROLE, MANIFEST_TYPE, Manifest, PhaseFacts
from stages.meta_models import built_on_meta
from stages.models import ModelDirectory
from stages.phases import Graph, first_task_alike
from stages.quantized import absent_and_strange
from stages.single_files import shapes_in_layout
from stages.weight_names import may_be_left_over, may_be_missing, shapes_as_loaded

_NAMED = 3  # tensors named in an error


def run(
    request: StageRequest, context: StageContext, events: Events
) -> tuple[StageResult, dict[str, Any]]:
    """Compute a model's manifest; for a request with a LoRA file what that changes of the model.

    Raises:
        ModelError: A weight file lacks a tensor that the configuration asks for, holds one of
            another shape, or holds one that no module has.
    """
    job = open_job(request, context, events)
    if request.adapters:
        return _adapter_facts(job)
    events.progress("running", message="reading configurations and headers")
    model = job.model
    with job.tracker.host_phase("run"):
        phases = {
            phase: _facts(job.graph, request.task, phase, model, job.dtype)
            for phase in job.graph.phases
        }
        names = {name for facts in phases.values() for name in facts.components}
        _require_components(job, names)
        counted = check_weights(model, names)
    manifest = Manifest(
        family=job.family.name,
        task=request.task,
        pipeline=job.family.pipeline,
        phases=phases,
        num_parameters=counted,
    )
    content = canonical_json(manifest.model_dump(mode="json"))
    return finish(job, {"manifest": job.store.put(content, MANIFEST_TYPE)})


def _adapter_facts(job: Job) -> tuple[StageResult, dict[str, Any]]:
    """What the one LoRA file of a request changes, if it fits the model."""
    (use,) = job.request.adapters
    job.events.progress("running", message="reading a LoRA file")
    with job.tracker.host_phase("run"):
        components = job.model.components
        facts = check_adapter(job.family, components, use, adapter_file(use, job.context))
    content = canonical_json(facts.model_dump(mode="json"))
    return finish(job, {ADAPTER_ROLE: job.store.put(content, MANIFEST_TYPE)})


def _require_components(job: Job, names: set[str]) -> None:
    """Refuse custom blocks that ask for models from elsewhere."""
    there = set(job.model.components)
    if job.graph.custom and (missing := sorted(names - there)):
        raise ModelError(
            f"custom blocks ask for a component {missing[0]!r}, which {job.context.model_dir} does "
            f"not have; it has {', '.join(sorted(there))}; put the component into the model "
            "directory"
        )


def _facts(
    graph: Graph, task: str, phase: str, model: ModelDirectory, dtype: torch.dtype
) -> PhaseFacts:
    pipe = prepare(graph, phase, model, dtype=dtype)
    made_before = {
        item.name
        for earlier in list(graph.phases)[: list(graph.phases).index(phase)]
        for item in graph.phases[earlier].intermediate_outputs
    }
    named = graph.input_names(phase)
    return PhaseFacts(
        components=tuple(sorted(component_names(pipe))),
        options=tuple(sorted(named - made_before - {"generator"})),
        inputs=tuple(sorted(named & made_before)),
        task=first_task_alike(graph, task, phase),
    )


def check_weights(model: ModelDirectory, names: set[str]) -> dict[str, int]:
    """Hold the weight files of a model's components to their configurations.

    Returns:
        Number of parameters by component, for those that have weights.

    Raises:
        ModelError: See `run`.
    """
    counted: dict[str, int] = {}
    for name, component in sorted(model.components.items()):
        if name not in names or not component.weight_files:
            continue
        module = built_on_meta(component)
        expected = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        tied = set(getattr(module, "_tied_weights_keys", None) or ())
        where = f"component {name!r} of {model.origin(name)}"
        found = shapes_as_loaded(module, shapes_in_layout(component, module))
        if component.quant_method is not None and component.gguf is None:
            _compare_names(where, module, expected, found, tied)
        else:
            _compare(where, module, expected, found, tied)
        counted[name] = sum(
            torch.Size(shape).numel() for key, shape in expected.items() if key not in tied
        )
    return counted


def _compare_names(
    where: str,
    module: torch.nn.Module,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    tied: set[str],
) -> None:
    """Hold quantized weights to a configuration: their shapes are those of packed numbers."""
    absent, strange = absent_and_strange(expected, found)
    absent = [key for key in absent if key not in tied and not may_be_missing(module, key)]
    if absent:
        raise ModelError(
            f"{where} lacks {len(absent)} of {len(expected)} tensors: {_some(absent)}; "
            "its files are incomplete or belong to another component"
        )
    if strange:
        raise ModelError(
            f"{where} holds {len(strange)} tensors that its config.json does not ask for: "
            f"{_some(strange)}; the two belong to different models"
        )


def _compare(
    where: str,
    module: torch.nn.Module,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    tied: set[str],
) -> None:
    missing = [
        key
        for key in expected
        if key not in found and key not in tied and not may_be_missing(module, key)
    ]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors: {_some(missing)}; "
            "its files are incomplete or belong to another component"
        )
    wrong = [key for key in expected if key in found and found[key] != expected[key]]
    if wrong:
        key = wrong[0]
        raise ModelError(
            f"{where}: tensor {key!r} is {found[key]} in its file but {expected[key]} by its "
            "config.json; the two belong to different models"
        )
    extra = [
        key
        for key in found
        if key not in expected
        and not key.startswith("lm_head.")
        and not may_be_left_over(module, key)
    ]
    if extra:
        raise ModelError(
            f"{where} holds {len(extra)} tensors that its config.json does not ask for: "
            f"{_some(extra)}; the two belong to different models"
        )


def _some(keys: list[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_NAMED])
    return shown if len(keys) <= _NAMED else f"{shown} and more"

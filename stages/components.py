"""Load the components of one phase, whole and checked, with stand-ins for the absent ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stages.errors import ModelError
from stages.models import ModelDirectory, open_model
from stages.phases import Graph
from stages.single_files import load_single_file
from stages.value_range import require_in_range


def bind(
    graph: Graph,
    phase: str,
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: str,
    sources: Mapping[str, Path] | None = None,
) -> Any:
    """A pipeline of one phase with its own components loaded and nothing else.

    Args:
        sources: As for `open_model`.

    Raises:
        ModelError: A component did not load, or a parameter stayed without a value.
    """
    model = open_model(model_dir, sources=sources)
    pipe = prepare(graph, phase, model, dtype=dtype)
    load(graph, pipe, component_names(pipe), model, dtype=dtype)
    pipe.to(device)
    return pipe


def prepare(graph: Graph, phase: str, model: ModelDirectory, *, dtype: torch.dtype) -> Any:
    """A pipeline of one phase before any weights: configuration components and stand-ins."""
    source = str(model.directory)
    whole = graph.pipeline_class(blocks=graph.whole, pretrained_model_name_or_path=source)
    pipe = graph.pipeline_class(blocks=graph.phases[phase], pretrained_model_name_or_path=source)
    for name in whole.config_component_names:  # rule 2
        setattr(pipe, name, getattr(whole, name))
    for name in graph.family.lent.get(phase, ()):
        pipe._component_specs.pop(name, None)
    for name in _left_out(graph, model) & set(pipe._component_specs):
        pipe._component_specs[name].pretrained_model_name_or_path = None
    for name in set(model.sources) & set(pipe._component_specs):
        spec = pipe._component_specs[name]
        spec.pretrained_model_name_or_path = str(model.components[name].directory)
        spec.subfolder = ""
    for name, stand_in in stand_ins(whole, pipe, model).items():  # rule 3
        setattr(pipe, name, stand_in.to(dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _left_out(graph: Graph, model: ModelDirectory) -> set[str]:
    """Optional components of the family that this model does not have."""
    return set(graph.family.optional) - set(model.components)


def load(
    graph: Graph, pipe: Any, names: list[str], model: ModelDirectory, *, dtype: torch.dtype
) -> None:
    """Load components into a prepared pipeline, on the CPU.

    Weights whose file dtype is `dtype` stay mapped from their files.

    Raises:
        ModelError: A component did not load, a parameter stayed without a value, or `dtype` cannot
            hold one.
    """
    dtypes = {name: getattr(torch, text) for name, text in graph.family.dtypes.items()}
    parts = model.components
    variants = {name: parts[name].variant for name in names if name in parts}
    single = [name for name in names if name in parts and parts[name].single_file]
    for name in single:
        pipe.update_components(**{name: load_single_file(parts[name], dtypes.get(name, dtype))})
    with _failures_kept("diffusers") as failures:
        pipe.load_components(
            names=[name for name in names if name not in single],
            dtype={"default": dtype, **dtypes},
            variant={"default": None, **variants},
            local_files_only=True,
        )
    _require_whole(pipe, names, model, failures)


def component_names(pipe: Any) -> list[str]:
    """The components of a phase that have files of their own."""
    return [
        name
        for name in pipe.pretrained_component_names
        if pipe._component_specs[name].pretrained_model_name_or_path
    ]


def stand_ins(whole: Any, pipe: Any, model: ModelDirectory) -> dict[str, Any]:
    """Models that the phase does not load, built from their configuration alone.

    Properties such as the VAE's scale factor fall back to constants when the model is absent,
    and give wrong shapes for every model that differs. A stand-in has the configuration, no
    weights, and is an attribute of the pipeline, not a component of it.
    """
    from accelerate import init_empty_weights
    from diffusers import ModelMixin

    found: dict[str, Any] = {}
    for name, spec in whole._component_specs.items():
        if name in pipe._component_specs or name not in model.components:
            continue
        if not (isinstance(spec.type_hint, type) and issubclass(spec.type_hint, ModelMixin)):
            continue
        kind: Any = spec.type_hint
        with init_empty_weights():
            folder = str(model.components[name].directory)
            found[name] = kind.from_config(kind.load_config(folder))
    return found


def renew_job_state(pipe: Any, guidance: Mapping[str, float]) -> None:
    """Give a loaded pipeline fresh guiders and schedulers, as a new process would have.

    Args:
        guidance: Guider component -> scale; a scale of at most 1 turns the guider off.

    Both keep state from call to call, which would make the second job differ from the first.
    """
    from diffusers.guiders import BaseGuidance
    from diffusers.schedulers import SchedulerMixin

    for name, component in list(pipe.components.items()):
        if isinstance(component, BaseGuidance) and name in guidance:
            scale = guidance[name]
            setattr(pipe, name, component.new(guidance_scale=scale, enabled=scale > 1))
        elif isinstance(component, BaseGuidance):
            setattr(pipe, name, component.new())
        elif isinstance(component, SchedulerMixin):
            setattr(pipe, name, type(component).from_config(component.config))


def _require_whole(pipe: Any, names: list[str], model: ModelDirectory, failures: list[str]) -> None:
    missing = [name for name in names if getattr(pipe, name, None) is None]
    if missing:
        reason = _last_line(failures)
        raise ModelError(
            f"component {missing[0]!r} of {model.origin(missing[0])} did not load: {reason}; "
            "check its files, or fetch the model again"
        )
    for name in names:
        component = getattr(pipe, name)
        if not isinstance(component, torch.nn.Module):
            continue
        empty = [
            key
            for key, tensor in [*component.named_parameters(), *component.named_buffers()]
            if tensor.is_meta
        ]
        if empty:
            raise ModelError(
                f"component {name!r} of {model.origin(name)} has {len(empty)} tensors that no "
                f"weight file holds, first {empty[0]!r}; the files are incomplete or belong to "
                "another model"
            )
        if name in model.components:
            require_in_range(component, model.components[name], str(model.origin(name)))


@contextmanager
def _failures_kept(logger_name: str) -> Iterator[list[str]]:
    """Keep a library's warnings, which are the only trace of a component that failed to load."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    logger = logging.getLogger(logger_name)
    handler, level, propagate = Keeper(logging.WARNING), logger.level, logger.propagate
    others = list(logger.handlers)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    try:
        yield kept
    finally:
        logger.handlers, logger.propagate = others, propagate
        logger.setLevel(level)


def _last_line(messages: list[str]) -> str:
    lines = [line for message in messages for line in message.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "the library gave no reason"

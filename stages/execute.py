"""Run one phase for a request: what encode, condition, denoise and decode have in common.

A stage process serves many requests of one phase; its pipeline is loaded once and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from stages.adapters import Worn, adapter_file
from stages.artifacts import ArtifactStore, open_store
from stages.borders import check_border
from stages.components import component_names, load, prepare, renew_job_state
from stages.contracts import (
    MEDIA_STAGE,
    ArtifactRef,
    StageContext,
    StageRequest,
    StageResult,
)
from stages.custom_blocks import describe_blocks, load_blocks
from stages.devices import require_device
from stages.errors import ModelError, RequestError
from stages.families import Family, family_named
from stages.handover import unpack, write
from stages.models import ModelDirectory, open_model
from stages.offload import Placement
from stages.phases import Graph, Handover, run_phase, split
from stages.report import RunTracker

HANDOVER_TYPE = "application/vnd.safetensors"


class Events(Protocol):
    """What a running stage tells its launcher."""

    def progress(self, activity: str, step: int = 0, num_steps: int = 0, message: str = "") -> None:
        """Say what the stage is doing and how far it is."""

    def warn(self, message: str) -> None:
        """Tell the user something that does not stop the stage."""


@dataclass(kw_only=True)
class Job:
    """One request on its way through a stage.

    Attributes:
        options: The pipeline's own arguments: the request's, less those for guiders, and the
            pictures, video and sound among its inputs.
        guidance: Guider component -> scale.
        handed: What the upstream artifacts hold, on the stage's device.
        facts: What the upstream artifacts say about themselves, by role.
        placement: Where the phase's models compute; set when they are loaded.
    """

    request: StageRequest
    context: StageContext
    events: Events
    tracker: RunTracker
    store: ArtifactStore
    family: Family
    graph: Graph
    options: dict[str, Any]
    guidance: dict[str, float]
    handed: Handover
    facts: dict[str, dict[str, Any]]
    placement: Placement | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The request's compute dtype."""
        return torch_dtype(self.request.dtype)

    @property
    def model(self) -> ModelDirectory:
        """The model as it lies on the disk now, with components from elsewhere."""
        sources = {name: Path(path) for name, path in self.context.sources.items()}
        return open_model(self.context.model_dir, sources=sources)


def open_job(request: StageRequest, context: StageContext, events: Events) -> Job:
    """Read a request's inputs and sort its options.

    Raises:
        DependencyError: The device is not usable.
        ArtifactMissing: An upstream artifact is gone or damaged.
        BorderError: One of its tensors cannot be right.
    """
    require_device(context.device)
    if context.num_threads is not None:
        torch.set_num_threads(context.num_threads)
    family = family_named(request.family)
    store = open_store(context.store_url)
    options: dict[str, Any] = dict(request.options)
    guidance = {
        guider: float(options.pop(option))
        for guider, option in family.guidance.items()
        if option in options
    }
    handed, facts = Handover(), {}
    for role, ref in sorted(request.inputs.items()):
        opened = unpack(store.path(ref), context.device)
        if opened.stage == MEDIA_STAGE:
            options |= opened.handover.values
            continue
        handed.values |= opened.handover.values
        handed.groups |= opened.handover.groups
        if opened.handover.generator_state is not None:
            handed.generator_state = opened.handover.generator_state
        facts[role] = opened.facts
        held = {**opened.handover.values, **opened.handover.groups}
        check_border(
            request.stage,
            {f"input {name}": value for name, value in held.items()},
            constants=[f"input {name}" for name in family.constants],
        )
    tracker = RunTracker(request, context)
    if request.blocks:
        tracker.facts["blocks"] = describe_blocks(Path(context.home_dir), request.blocks)
    return Job(
        request=request,
        context=context,
        events=events,
        tracker=tracker,
        store=store,
        family=family,
        graph=_graph_of(request, context),
        options=options,
        guidance=guidance,
        handed=handed,
        facts=facts,
    )


def loaded_pipe(job: Job) -> Any:
    """The phase's pipeline with all its components where they compute; loaded once a process."""
    kept = _kept(job)
    pipe, placement = kept.pipe, kept.placement
    names = [name for name in component_names(pipe) if getattr(pipe, name, None) is None]
    if names or not kept.is_placed:
        job.events.progress("loading", message=", ".join(names))
        with job.tracker.host_phase("load"):
            _require_same_files(job)
            if names:
                load(job.graph, pipe, names, job.model, dtype=job.dtype)
            _require_same_files(job)
        with job.tracker.host_phase("place"):
            placement.place(pipe, job.model.components)
        kept.is_placed = True
    if kept.worn.uses or job.request.adapters:
        with job.tracker.host_phase("adapters"):
            kept.worn.change(pipe, job.family, job.request.adapters, job.context)
    renew_job_state(pipe, job.guidance)
    job.placement = placement
    return pipe


def _require_same_files(job: Job) -> None:
    """Refuse a model whose files changed after the request was made.

    Its result would be kept under the fingerprint of files that are gone. Costs a `stat` per
    file while nothing has changed. LoRA files count: their tensors, too, are mapped.
    """
    for use in job.request.adapters:
        adapter_file(use, job.context)
    model = job.model
    for name, expected in job.request.components.items():
        found = model.components[name].fingerprint(Path(job.context.home_dir))
        if found != expected:
            raise ModelError(
                f"component {name!r} of {model.origin(name)} changed while the run was under way: "
                f"its fingerprint was {expected[:16]} and is {found[:16]}; start the run again"
            )


def prepared_pipe(job: Job) -> Any:
    """The phase's pipeline, perhaps without weights yet; the same one for every request."""
    return _kept(job).pipe


def run_job(job: Job, pipe: Any) -> Handover:
    """Run the phase's blocks and check what they made.

    Raises:
        BorderError: The phase made values that cannot be right.
    """
    request = job.request
    with job.tracker.host_phase("run"), job.placement.memory() if job.placement else nullcontext():
        made = run_phase(job.graph, request.stage, pipe, job.options, job.handed, seed=request.seed)
        if job.context.device.startswith("cuda"):
            torch.cuda.synchronize(job.context.device)
        held = {**made.values, **made.groups}
        check_border(request.stage, held, constants=job.family.constants)
    _require_same_files(job)  # weights were read from them until now
    return made


def finish_handover(
    job: Job, role: str, made: Handover, facts: Mapping[str, Any]
) -> tuple[StageResult, dict[str, Any]]:
    """Write a handover, record it under the request, and report."""
    with job.tracker.host_phase("write"), job.store.create(HANDOVER_TYPE) as artifact:
        write(artifact, job.request.stage, made, facts)
    return finish(job, {role: artifact.ref})


def finish(job: Job, artifacts: dict[str, ArtifactRef]) -> tuple[StageResult, dict[str, Any]]:
    """Record artifacts under the request, and report."""
    result = StageResult(stage=job.request.stage, artifacts=artifacts)
    job.store.record(job.request, result)
    if job.placement is not None:
        job.tracker.facts["offload"] = job.placement.report()
    return result, job.tracker.report()


def torch_dtype(name: str) -> torch.dtype:
    """A torch dtype by its name.

    Raises:
        RequestError: Not a floating dtype that weights come in.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise RequestError(f"dtype {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]


def quiet_libraries() -> None:
    """Keep the libraries' bars and advice off the log; errors come as exceptions, once."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _graph_of(request: StageRequest, context: StageContext) -> Graph:
    blocks = tuple(sorted(request.blocks.items()))
    return _graph(request.family, request.task, blocks, context.home_dir if blocks else "")


@lru_cache(maxsize=8)
def _graph(family: str, task: str, blocks: tuple[tuple[str, str], ...], home_dir: str) -> Graph:
    quiet_libraries()
    return split(family_named(family), task, load_blocks(Path(home_dir), dict(blocks)))


@dataclass(kw_only=True)
class _Kept:
    """The pipeline that this process keeps from request to request."""

    key: tuple[object, ...]
    pipe: Any
    placement: Placement
    is_placed: bool = False
    worn: Worn = field(default_factory=Worn)


_KEPT: list[_Kept] = []  # one phase, one model: a second one pushes the first one out


def _kept(job: Job) -> _Kept:
    request, context = job.request, job.context
    key = (
        *(request.family, request.task, request.stage, request.dtype, *request.blocks.items()),
        *(context.model_dir, context.device, context.offload),
        tuple(sorted(context.sources.items())),
    )
    if _KEPT and _KEPT[0].key == key:
        return _KEPT[0]
    while _KEPT:
        _KEPT.pop().placement.detach()
    graph = job.graph
    pipe = prepare(graph, request.stage, job.model, dtype=torch_dtype(request.dtype))
    placement = Placement(context.device, context.offload)
    _KEPT.append(_Kept(key=key, pipe=pipe, placement=placement))
    return _KEPT[0]

"""Split a modular pipeline's blocks into phases, and run one of them.

Works on any modular pipeline of diffusers by one rule: every pipeline has a top-level block
named `denoise`; what stands before it encodes, what stands after it decodes. Of what encodes,
blocks that read media and no prompt make up a phase of their own, `condition`, so that one
encoded prompt serves any picture and one encoded picture any prompt. Six rules make the split
bit-exact; each is marked where it is kept, and each has a test that fails without it.

1. Blocks are resolved once over the whole graph, for a branch may depend on another phase.
2. Guiders and processors come from the whole pipeline, not from the phase.
3. Absent models lend their configuration through stand-ins without weights.
4. Values that travel as a group (`denoiser_input_fields`) are handed on as a group.
5. The generator's state travels with the values.
6. Strides travel with the tensors (`stages.codec`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.custom_blocks import with_custom
from stages.errors import RequestError, StageFailed
from stages.families import Family

PHASES = ("encode", "condition", "denoise", "decode")
"""All phases there are, in the order they run; a task has those that it has blocks for."""

MEDIA = frozenset(
    {
        *("image", "mask_image", "last_image", "reference_images", "control_image"),
        *("ip_adapter_image", "video", "mask", "audio", "conditions"),
    }
)
"""The arguments of pipelines that hold pictures, video or sound."""

PROMPT = "prompt"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A pipeline's blocks for one task: whole, and phase by phase.

    Attributes:
        pipeline_class: The modular pipeline class.
        whole: All blocks, unresolved: what the pipeline class itself would run.
        phases: Resolved blocks of each phase that has any, in the order they run.
        custom: Blocks among them that are not the family's own, by name.
    """

    family: Family
    pipeline_class: type[Any]
    whole: Any
    phases: Mapping[str, Any]
    custom: Mapping[str, Any] = field(default_factory=dict)

    def later(self, phase: str) -> list[Any]:
        """The blocks of every phase after this one."""
        names = list(self.phases)
        return [self.phases[name] for name in names[names.index(phase) + 1 :]]

    def input_names(self, phase: str) -> set[str]:
        """The named inputs that a phase's blocks take."""
        return {item.name for item in self.phases[phase].inputs if item.name}


@dataclass(kw_only=True)
class Handover:
    """What one phase hands the next.

    Attributes:
        values: By name: tensors and plain values.
        groups: By group name: values that a block takes as one mapping.
        generator_state: uint8 state of the CPU generator after the phase; None before any.
    """

    values: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    generator_state: torch.Tensor | None = None


def split(family: Family, task: str, custom: Mapping[str, Any] | None = None) -> Graph:
    """The blocks of a family's task, by phase.

    Args:
        custom: Blocks in the place of the family's own; see `stages.custom_blocks`.

    Raises:
        RequestError: The family has no such task, or no block that a custom one is named after.
    """
    from diffusers.modular_pipelines import SequentialPipelineBlocks

    if task not in family.tasks:
        known = ", ".join(sorted(family.tasks))
        raise RequestError(f"{family.name} has no task {task!r}; its tasks are {known}")
    pipeline_class, whole = _whole(family)
    triggers = dict.fromkeys(family.tasks[task], True)
    if custom:
        whole = with_custom(whole, custom, triggers)
    leaves = whole.get_execution_blocks(**triggers).sub_blocks  # rule 1
    tops = list(dict.fromkeys(_top(name) for name in leaves))
    cut = tops.index("denoise")

    def blocks_of(names: Sequence[str]) -> Any:
        return SequentialPipelineBlocks.from_blocks_dict(
            {name: block for name, block in leaves.items() if _top(name) in names}
        )

    condition = _conditioning({top: blocks_of([top]) for top in tops[:cut]})
    groups = {
        "encode": [top for top in tops[:cut] if top not in condition],
        "condition": condition,
        "denoise": ["denoise"],
        "decode": tops[cut + 1 :],
    }
    phases = {phase: blocks_of(names) for phase, names in groups.items() if names}
    return Graph(
        family=family,
        pipeline_class=pipeline_class,
        whole=whole,
        phases=phases,
        custom=custom or {},
    )


def _whole(family: Family) -> tuple[type[Any], Any]:
    """A family's modular pipeline class and all of its blocks."""
    import diffusers

    if family.encoded:
        from stages.classic import classic_blocks

        return diffusers.ModularPipeline, classic_blocks(family)
    pipeline_class = getattr(diffusers, family.pipeline)
    return pipeline_class, getattr(diffusers, pipeline_class.default_blocks_name)()


def _top(leaf_name: str) -> str:
    return leaf_name.split(".", 1)[0]


def _conditioning(tops: Mapping[str, Any]) -> list[str]:
    """Of the blocks before `denoise`, those that read media and no prompt, and what needs them.

    A text encoder that looks at a picture too stays an encoder: its output is of that prompt.
    """
    names: list[str] = []
    made: set[str] = set()
    for top, blocks in tops.items():
        taken = {item.name for item in blocks.inputs if item.name}
        if (taken & MEDIA and PROMPT not in taken) or taken & made:
            names.append(top)
            made |= {item.name for item in blocks.intermediate_outputs}
    return names


def handed_on(graph: Graph, phase: str) -> set[str]:
    """Names of the values that a phase can make for later ones."""
    made = {item.name for item in graph.phases[phase].intermediate_outputs}
    return made & {item.name for block in graph.later(phase) for item in block.inputs if item.name}


def first_task_alike(graph: Graph, task: str, phase: str) -> str:
    """The first task of the family for which a phase is and hands on the same as for `task`.

    Its results serve both: a prompt that was encoded for a picture out of nothing is encoded for
    one that starts from another picture.
    """
    wanted = _likeness(graph, phase)
    for other in graph.family.tasks:
        if other == task:
            break
        found = split(graph.family, other, graph.custom)
        if phase in found.phases and _likeness(found, phase) == wanted:
            return other
    return task


def _likeness(graph: Graph, phase: str) -> tuple[Any, ...]:
    leaves = graph.phases[phase].sub_blocks.items()
    blocks = [
        (name, f"{type(block).__module__}.{type(block).__qualname__}") for name, block in leaves
    ]
    return blocks, sorted(handed_on(graph, phase)), sorted(_group_kinds(graph.later(phase)))


def run_phase(
    graph: Graph,
    phase: str,
    pipe: Any,
    options: Mapping[str, Any],
    handed: Handover,
    *,
    seed: int | None = None,
) -> Handover:
    """Run one phase on a pipeline that `stages.components.bind` made.

    Args:
        options: The pipeline's own arguments, by name.
        handed: What the phases before this one handed on.
        seed: Seeds a CPU generator, unless `handed` carries a generator state.

    Returns:
        What later phases need; after the last phase, its output.

    Raises:
        RequestError: An option that the phase's blocks do not take.
        StageFailed: The phase drew random numbers and was given no generator.
    """
    blocks = graph.phases[phase]
    named = graph.input_names(phase)
    if unknown := set(options) - named:
        raise RequestError(
            f"the {phase} phase of {graph.family.name} takes no option {sorted(unknown)[0]!r}; "
            f"it takes {', '.join(sorted(named))}"
        )
    arguments = {
        name: value
        for name, value in {**handed.values, **options}.items()
        if name in named and value is not None
    }
    arguments |= {  # rule 4: named alone, these would be dropped without a word
        kind: handed.groups[kind] for kind in _group_kinds([blocks]) if handed.groups.get(kind)
    }
    generator = make_generator(seed, handed.generator_state)
    if "generator" in named and generator is not None:
        arguments["generator"] = generator
    with warnings.catch_warnings(), _nothing_drawn(graph, phase, generator):
        warnings.filterwarnings("error", message="Unexpected input")
        state = pipe(**arguments)
    state_after = None if generator is None else generator.get_state()
    values, groups = _needed_later(graph, phase, state, handed.values, set(options))
    return Handover(values=values, groups=groups, generator_state=state_after)


@contextmanager
def _nothing_drawn(graph: Graph, phase: str, generator: torch.Generator | None) -> Iterator[None]:
    """Blocks without a generator draw from torch's own, which no seed of a request governs."""
    before = [] if generator is not None else _own_states()
    yield
    if any(not torch.equal(*pair) for pair in zip(before, _own_states(), strict=False)):
        raise StageFailed(
            f"the {phase} phase of {graph.family.name} drew random numbers without a seed, so no "
            "run could repeat it; name the phase in the family's `drawing`"
        )


def _own_states() -> list[torch.Tensor]:
    """The states of torch's own generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return states


def make_generator(seed: int | None, state: torch.Tensor | None) -> torch.Generator | None:
    """A CPU generator in a carried state, or freshly seeded, or none."""
    if seed is None and state is None:
        return None
    generator = torch.Generator("cpu")
    if state is not None:
        generator.set_state(state)  # rule 5
    else:
        assert seed is not None
        generator.manual_seed(seed)
    return generator


def _needed_later(
    graph: Graph, phase: str, state: Any, carried: Mapping[str, Any], given: set[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values and groups that later phases take and the job does not give them itself."""
    blocks, later = graph.phases[phase], graph.later(phase)
    made = {item.name for item in blocks.intermediate_outputs}
    values = {name: state.values[name] for name in made if name in state.values}
    if not later:
        return {name: values[name] for name in graph.family.products}, {}
    needed = {item.name for block in later for item in block.inputs if item.name}
    needed -= {"generator"} | given
    groups = {
        kind: {
            name: state.values[name]
            for name in state.kwargs_mapping.get(kind, ())
            if name not in needed
        }
        for kind in _group_kinds(later)
    }
    kept = {name: value for name, value in {**carried, **values}.items() if name in needed}
    return kept, {kind: group for kind, group in groups.items() if group}


def _group_kinds(blocks: Sequence[Any]) -> set[str]:
    return {item.kwargs_type for block in blocks for item in block.inputs if item.name is None}

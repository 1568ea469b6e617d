"""What `inspect` found out about a model: small, plain, and readable without torch."""

from __future__ import annotations

from pydantic import Field

from stages.contracts import Record

MANIFEST_TYPE = "application/vnd.exeunt.manifest+json"
ADAPTER_ROLE = "adapter"


class PhaseFacts(Record):
    """One phase of a model.

    Attributes:
        components: Components whose files the phase loads.
        options: Names of the options its blocks take.
        inputs: Names of the values it takes from earlier phases.
        task: The family's first task for which the phase is the same: requests are made under
            its name, so that tasks share what they have in common.
    """

    components: tuple[str, ...]
    options: tuple[str, ...]
    inputs: tuple[str, ...]
    task: str = ""


class Manifest(Record):
    """A model's phases, computed from its pipeline's blocks and its configurations.

    Attributes:
        phases: By phase, in the order they run.
        num_parameters: By component, counted from its configuration.
    """

    schema_version: int = 1
    family: str
    task: str
    pipeline: str
    phases: dict[str, PhaseFacts]
    num_parameters: dict[str, int] = Field(default_factory=dict)


class AdapterFacts(Record):
    """What a LoRA file changes of a model.

    Attributes:
        components: Components that have a layer which it changes.
    """

    schema_version: int = 1
    components: tuple[str, ...]

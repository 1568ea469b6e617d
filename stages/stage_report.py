"""The report of one stage request as a record, and its JSON schema.

`RunTracker` collects a report as plain values and does not look at them with this record: a
result is worth more than its report. Tests hold every stage's reports to it.

Times are host wall-clock seconds, memory is bytes. This module loads no torch.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from stages.contracts import DIGEST_PATTERN, Record, StageName

SCHEMA = "exeunt.stage-report/1"
SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Nbytes = Annotated[int, Field(ge=0)]


class HostPhase(Record):
    """A part of the request, such as `load` or `run`; one may lie inside of another."""

    name: str
    start_s: Seconds = Field(description="Since the request began.")
    elapsed_s: Seconds


class Steps(Record):
    """Steps of the denoising loop, as the host saw them end."""

    num_steps: Count = Field(description="Of the whole loop; 0 without one.")
    num_run: Count = Field(description="In this process; fewer where a checkpoint was resumed.")
    median_s: Seconds | None = Field(description="Between two ends; null with fewer than two.")


class Memory(Record):
    """Memory of the stage process. What a system does not tell is absent."""

    peak_rss_bytes: Nbytes = Field(description="Most resident memory since the process began.")
    anonymous_bytes: Nbytes = Field(0, description="When the request ended.")
    file_backed_bytes: Nbytes = Field(0, description="When the request ended.")
    locked_bytes: Nbytes = Field(0, description="When the request ended.")
    device_peak_allocated_bytes: Nbytes = Field(0, description="By torch, in this request.")
    device_peak_reserved_bytes: Nbytes = Field(0, description="By torch, in this request.")


class MemorySamples(Record):
    """Readings of memory over the request: lists of one length. A list may be absent."""

    at_s: list[Seconds] = Field(description="Since the request began.")
    anonymous_bytes: list[Nbytes] = Field([])
    file_backed_bytes: list[Nbytes] = Field([])
    locked_bytes: list[Nbytes] = Field([])
    device_used_bytes: list[Nbytes] = Field([], description="Of the device, by all processes.")


class TokenUse(Record):
    """How many tokens a prompt has, for one text encoder."""

    prompt: str = Field(description="Name of the argument, such as `negative_prompt`.")
    encoder: str
    tokens_total: Count
    tokens_used: Count
    dropped_text: str = Field(description="What was not read.")


class Checkpoints(Record):
    """Checkpoints of the loop that were written; in reports of `denoise`."""

    every_steps: int | None
    every_s: Seconds | None
    num_written: Count
    nbytes: Nbytes
    elapsed_s: Seconds = Field(description="That writing them took.")
    refusal: str | None = Field(description="Why none could be written.")


class Offload(Record):
    """How models shared the device with the work."""

    model_config = ConfigDict(extra="allow")

    preset: str
    device: str
    components: dict[str, dict[str, Any]] = Field(
        description="By component, the report of its session; see docs/reference/offload.md."
    )


class StageReport(Record):
    """What one request of one stage cost. A request whose result was found has none."""

    schema_name: Literal["exeunt.stage-report/1"] = Field(alias="schema")
    stage: StageName
    label: str = Field(description="For people; may hold a part of the prompt.")
    request_digest: str = Field(pattern=DIGEST_PATTERN)
    run_id: str = Field(description="Of the Prefect flow run.")
    host: str
    pid: int
    device: str = Field(description="`cpu`, `cuda` or `cuda:N`.")
    device_name: str
    dtype: str = Field(description="Compute dtype, by torch's name.")
    started_at: float = Field(description="Seconds since 1970.")
    elapsed_s: Seconds
    host_phases: list[HostPhase]
    steps: Steps
    memory: Memory
    memory_samples: MemorySamples
    versions: dict[str, str] = Field(description="Of Python and of what results depend on.")
    warnings: list[str]
    fallbacks: list[str] = Field(description="What was not done in the best way, in sentences.")
    tokens: list[TokenUse] | None = Field(None, description="In reports of `encode`.")
    token_limit: Count | None = Field(
        None, description="In reports of `encode`: the most that was asked to be read."
    )
    resumed_from_step: Count | None = Field(
        None, description="In reports of `denoise`: steps that were not run again."
    )
    checkpoints: Checkpoints | None = None
    blocks: dict[str, dict[str, Any]] | None = Field(
        None, description="Custom blocks that ran: digest, entry, and sha256 by file."
    )
    offload: Offload | None = None


def json_schema() -> str:
    """The JSON schema of a stage report, as the text of `docs/reference/stage-report.schema.json`.

    A later version may add fields: readers pass over those that they do not know.
    """
    schema = {"$schema": SCHEMA_ID, **StageReport.model_json_schema(by_alias=True)}
    return json.dumps(_open(schema), indent=2) + "\n"


def _open(schema: Any) -> Any:
    """The schema without its refusals of unknown fields."""
    if isinstance(schema, list):
        return [_open(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _open(value)
        for name, value in schema.items()
        if not (name == "additionalProperties" and value is False)
    }

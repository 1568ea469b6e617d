"""A phase's handover as one safetensors file, and back.

The file's bytes are determined by what it holds: one metadata entry of canonical JSON, no
time, no host, no request. Two requests whose results are equal therefore make one artifact,
and a stage whose `code_version` was raised without effect recomputes nothing after itself.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stages.codec import from_entries, to_entries
from stages.contracts import HANDOVER_SCHEMA, METADATA_KEY, canonical_json
from stages.errors import ArtifactError
from stages.phases import Handover
from stages.safetensors_header import Sink, TensorBytes
from stages.safetensors_header import write as write_safetensors

GENERATOR_ENTRY = "generator_state"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A handover read back, with the facts that were stored beside it.

    Attributes:
        stage: The stage that made it.
        facts: Plain JSON, such as `tokens` of a prompt or `latents` for their layout.
    """

    stage: str
    handover: Handover
    facts: dict[str, Any]


def write(sink: Sink, stage: str, handover: Handover, facts: Mapping[str, Any]) -> None:
    """Write the file tensor by tensor; equal handovers and facts give equal bytes.

    Raises:
        HeaderError: There are so many tensors that no reader would open the file.
    """
    entries, tree = to_entries({"values": handover.values, "groups": handover.groups})
    if handover.generator_state is not None:
        entries[GENERATOR_ENTRY] = handover.generator_state.clone()
    document = {"schema": HANDOVER_SCHEMA, "stage": stage, "tree": tree, "facts": dict(facts)}
    metadata = {METADATA_KEY: canonical_json(document).decode("ascii")}
    write_safetensors(sink, {name: _bytes_of(each) for name, each in entries.items()}, metadata)


def pack(stage: str, handover: Handover, facts: Mapping[str, Any]) -> bytes:
    """What `write` writes."""
    buffer = io.BytesIO()
    write(buffer, stage, handover, facts)
    return buffer.getvalue()


def _bytes_of(tensor: torch.Tensor) -> TensorBytes:
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "data": flat.numpy().data,
    }


def unpack(path: Path, device: str = "cpu") -> Opened:
    """Read a handover; its tensors go to `device`, the generator state stays on the CPU.

    Raises:
        ArtifactError: Not a handover, or one of a newer schema.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        document = parse_metadata(file.metadata(), str(path))
        entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    generator_state = entries.pop(GENERATOR_ENTRY, None)
    tree = from_entries(entries, document["tree"])
    return Opened(
        stage=document["stage"],
        handover=Handover(
            values=_to_device(tree["values"], device),
            groups=_to_device(tree["groups"], device),
            generator_state=generator_state,
        ),
        facts=document["facts"],
    )


def parse_metadata(metadata: Mapping[str, str] | None, where: str) -> dict[str, Any]:
    """The handover's document out of a safetensors header.

    Raises:
        ArtifactError: Not a handover, or one of a newer schema.
    """
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        raise ArtifactError(
            f"{where} is not a handover: its metadata has no {METADATA_KEY!r} entry"
        )
    document: dict[str, Any] = json.loads(text)
    if document.get("schema") != HANDOVER_SCHEMA:
        raise ArtifactError(
            f"{where} has schema {document.get('schema')!r}, this version reads "
            f"{HANDOVER_SCHEMA!r}; "
            "update exeunt, or run again with --fresh"
        )
    return document


def _to_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_device(item, device) for item in value]
    if type(value) is tuple:
        return tuple(_to_device(item, device) for item in value)
    return value

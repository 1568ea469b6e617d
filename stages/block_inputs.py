"""Inputs of custom blocks that no argument of a family carries, as `NAME=VALUE`. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from stages.contracts import canonical_json
from stages.errors import RequestError
from stages.manifest import Manifest
from stages.text_rules import shown


def parse_block_inputs(texts: Sequence[str], blocks: Mapping[str, str]) -> dict[str, JsonValue]:
    """Values by name; what is no JSON is a text.

    Args:
        blocks: The custom blocks that run.

    Raises:
        RequestError: There are no custom blocks, a text has no name or a name comes twice, or a
            value cannot be part of a request.
    """
    found: dict[str, JsonValue] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise RequestError(f"block_input is {shown(text)}, expected NAME=VALUE")
        if name in found:
            raise RequestError(f"block_input {name} is given twice; give it once")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
        try:
            canonical_json(found[name])
        except ValueError as error:
            raise RequestError(f"block_input {name}: {error}") from error
    if found and not blocks:
        raise RequestError(
            f"block_input {next(iter(found))} has nothing to go to; give --blocks as well"
        )
    return found


def inputs_of_phase(
    inputs: Mapping[str, JsonValue], manifest: Manifest, stage: str, given: Mapping[str, object]
) -> dict[str, JsonValue]:
    """Those of the inputs that a phase takes.

    Args:
        given: What the flow itself gives the phase.

    Raises:
        RequestError: No phase takes one of them, or it has an argument of its own.
    """
    taken = {name for facts in manifest.phases.values() for name in facts.options}
    for name in inputs:
        if name not in taken:
            raise RequestError(
                f"no block takes an input {name!r}; the blocks take {', '.join(sorted(taken))}"
            )
        if given.get(name) is not None:
            raise RequestError(f"block_input {name} is an argument of the command; give it there")
    options = manifest.phases[stage].options
    return {name: value for name, value in inputs.items() if name in options}

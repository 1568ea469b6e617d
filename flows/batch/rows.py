"""One row of a batch, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """A row that was checked.

    Attributes:
        number: In the table, from 1.
        id: Unique in the table.
        arguments: All arguments of the family's flow function.
        own: Those of them that are not the function's defaults.
        file_name: Relative to the output folder, unique in the batch, with its extension.
        seed: The seed that `arguments` names, or the one that was made for the row.
        digest: Of all that determines its file's content.
    """

    number: int
    id: str
    arguments: Mapping[str, Any]
    own: Mapping[str, Any]
    file_name: str
    seed: int
    digest: str


@dataclass(frozen=True, slots=True)
class Work:
    """What one row costs, as far as its arguments tell."""

    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    is_guided: bool

"""A family's flow asks the batch around it for its model, its run and its phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.batch.scope import RowPaused, current_scope, in_scope, remembered, remembering


class Stopping:
    """A scope that pauses the row at once, and keeps what it was asked."""

    def __init__(self) -> None:
        self.runs: list[Mapping[str, Any]] = []
        self.phases: list[str] = []

    def run(self, arguments: Mapping[str, Any], make: Any) -> Any:
        self.runs.append(arguments)
        return make(**arguments)

    def phase(self, run: Any, stage: Any) -> Any:
        self.phases.append(stage)
        raise RowPaused(stage)

    def save(self, content: bytes, save_as: Any, settings: Any, *, embed: bool) -> Path:
        raise AssertionError("nothing was painted")


def test_what_is_remembered_is_made_once_within_the_block_and_each_time_outside() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [remembered("a", make) for _ in range(2)] == [1, 2]
    with remembering():
        with remembering():  # the outer one's memory serves
            assert remembered("a", make) == 3
        assert [remembered("a", make), remembered("b", make)] == [3, 4]
    assert remembered("a", make) == 5


def test_a_flow_in_a_scope_asks_for_its_run_and_stops_where_its_phase_has_to_wait(
    home: Path, tmp_path: Path
) -> None:
    from flows.z_image import z_image

    scope = Stopping()
    with in_scope(scope), pytest.raises(RowPaused) as paused:
        z_image.fn("a red fox", output=str(tmp_path), device="cpu")
    assert paused.value.stage == "encode"
    assert [each["task"] for each in scope.runs] == ["text-to-image"]
    assert scope.phases == ["encode"]
    assert current_scope() is None

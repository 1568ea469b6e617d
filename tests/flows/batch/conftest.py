"""Batches of the tiny Z-Image model in a home of their own, with what each one took."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.batch.results import RowResult
from tests.support.stage_processes import eventually
from tests.support.studio import TINY


@dataclass
class Ran:
    """What one start of a batch took.

    Attributes:
        started: Stage processes, by stage.
        ran: Requests that a stage process did, by stage.
        rows: The results' table after it, by id.
    """

    summary: Any
    started: Counter[str]
    ran: Counter[str]
    rows: dict[str, RowResult]


class Nights:
    """Runs batches in one home and one output folder."""

    def __init__(self, model: Path, home: Path, folder: Path, launcher: Any) -> None:
        self.model, self.home, self.output = model, home, folder / "out"
        self.table, self._launcher = folder / "rows.jsonl", launcher
        self.shared: dict[str, Any] = TINY  # arguments for all rows

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the table."""
        self.table.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, tries: int = 1, **options: Any) -> Ran:
        """Start the batch; a batch that ends with an error raises it."""
        from flows.batch import results
        from flows.batch.flow import batch

        before, reports = Counter(self._launcher.num_processes_started), set(self.reports())
        arguments = self.shared | {"model": str(self.model), "device": "cpu"}
        arguments |= options.pop("arguments", {})
        options = {"table": str(self.table), "family": "z-image"} | options
        retried = batch.with_options(retries=tries - 1)
        summary = retried(arguments=arguments, output=str(self.output), **options)
        new = set(self.reports()) - reports
        return Ran(
            summary=summary,
            started=Counter(self._launcher.num_processes_started) - before,
            ran=Counter(json.loads(path.read_text())["stage"] for path in new),
            rows={row.id: row for row in results.read(self.output / results.NAME)},
        )

    def reports(self) -> list[Path]:
        """Of all stage requests in this home."""
        return list((self.home / "reports").rglob("*.json"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support import tiny_models

    return tiny_models.z_image(tmp_path_factory.mktemp("tiny") / "z-image")


@pytest.fixture(scope="module")
def batch_launcher(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One fork server for the module, as one flow process has.

    The module's `ENVIRON` is added to the environment of what it makes.
    """
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in getattr(request.module, "ENVIRON", {}).items():
            patch.setenv(name, value)
        made = shared_launcher("forkserver")
    made.expect("z-image")
    made.start_fork_server()
    assert eventually(_has_fork_server)  # it is there before what a test leaves is counted
    yield made
    made.close()
    shared_launcher.cache_clear()


def _has_fork_server() -> bool:
    children = Path(f"/proc/self/task/{os.getpid()}").parent.glob("*/children")
    pids = [pid for each in children for pid in each.read_text().split()]
    return any(b"stages.forkserver" in Path(f"/proc/{p}/cmdline").read_bytes() for p in pids)


@pytest.fixture
def nights(
    tiny_model: Path, home: Path, tmp_path: Path, batch_launcher: Any, prefect_server: str
) -> Nights:
    return Nights(tiny_model, home, tmp_path, batch_launcher)

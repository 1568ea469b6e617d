"""What was shown of each family and task, as a table: `python -m tests.support.matrix`.

Runs the tests of every family with tiny models, and says of each family and task that is declared
what passed, failed, was skipped with its reason, or has no test. `--write` puts the table into
`docs/reference/families.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.families import FAMILIES, family_named
from tests.support.picture_tasks import TASKS
from tests.support.video_cases import VIDEO_CASES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"

PROPERTIES = ("whole == staged", "resumed", "batched")
TESTS = {
    "test_stages_through_artifacts_equal_the_unsplit_pipeline": "whole == staged",
    "test_the_video_of_the_stages_is_that_of_the_unsplit_pipeline": "whole == staged",
    "test_a_job_in_a_batch_has_the_bits_it_has_alone": "batched",
    "test_every_family_ends_with_the_bits_of_the_undisturbed_run": "resumed",
    "test_a_killed_loop_ends_with_the_bits_of_the_undisturbed_run": "resumed",
    "test_a_killed_denoise_ends_with_the_undisturbed_bits": "resumed",
}
SINGLE_TESTS = {
    "test_a_video_between_two_frames_equals_the_unsplit_pipeline": (
        "wan-i2v",
        "first-and-last-frame",
        "whole == staged",
    )
}
MODULES = ("test_families", "test_picture_tasks", "test_video_families", "test_checkpoints")
NO_TEST = "no test"

Cell = tuple[str, str, str]
"""Family, task, property."""


def cells() -> list[tuple[str, str]]:
    """Each family with each of its tasks, as declared."""
    return [(name, task) for name in sorted(FAMILIES) for task in family_named(name).tasks]


def cell_of(item: Any) -> Cell | None:
    """What a test shows, and of which family and task; None for the other tests."""
    if item.originalname in SINGLE_TESTS:
        return SINGLE_TESTS[item.originalname]
    shown = TESTS.get(item.originalname)
    if shown is None:
        return None
    given = item.callspec.params
    if "task" in given:
        task = TASKS[given["task"]]
        return task.case.name, task.name, shown
    if item.path.stem == "test_video_families":
        video = VIDEO_CASES[given["case"]]
        return video.name, video.task, shown
    return given.get("case") or given["name"], "text-to-image", shown


class Outcomes:
    """A plugin of pytest that keeps the tests of the matrix and what came of them."""

    def __init__(self) -> None:
        self.found: dict[Cell, list[str]] = {}
        self._cells: dict[str, Cell] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self._cells = {item.nodeid: cell for item in items if (cell := cell_of(item))}
        items[:] = [item for item in items if item.nodeid in self._cells]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        text = report.outcome
        if report.skipped:
            text = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
        self.found.setdefault(self._cells[report.nodeid], []).append(text)


def summary(outcomes: Sequence[str]) -> str:
    """One cell: the worst that came of its tests, or how many passed."""
    if "failed" in outcomes:
        return f"FAILED, {outcomes.count('failed')} of {len(outcomes)}"
    skipped = [text for text in outcomes if text != "passed"]
    if skipped:
        return skipped[0]
    return f"passed ({len(outcomes)})" if outcomes else NO_TEST


def table(found: dict[Cell, list[str]]) -> str:
    """The matrix in Markdown, a row for each family and task."""
    rows = [f"| family | task | {' | '.join(PROPERTIES)} |", "| --- " * 5 + "|"]
    for name, task in cells():
        made = [summary(found.get((name, task, shown), [])) for shown in PROPERTIES]
        rows.append(f"| {name} | {task} | {' | '.join(made)} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the tests and print the table; returns pytest's exit code."""
    outcomes = Outcomes()
    paths = [str(REPOSITORY / "tests" / "stages" / f"{module}.py") for module in MODULES]
    # what this module imports, pytest's plugins can no longer rewrite; no assertion of theirs fails
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*options, *paths], plugins=[outcomes]))
    made = table(outcomes.found)
    print(made)
    if "--write" in arguments:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

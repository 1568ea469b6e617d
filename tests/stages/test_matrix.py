"""The matrix of what was shown: the reference leaves out no family or task that is declared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.matrix import BEGIN, END, PAGE, cell_of, cells, summary, table


def test_the_page_has_a_row_for_every_family_and_task() -> None:
    made = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [tuple(row.strip("| ").split(" | ")[:2]) for row in made.splitlines()[2:]]
    assert rows == cells(), "run python -m tests.support.matrix --write"
    assert "FAILED" not in made


def test_a_cell_tells_the_worst_of_its_tests() -> None:
    assert summary(["passed", "passed"]) == "passed (2)"
    assert summary(["passed", "failed"]) == "FAILED, 1 of 2"
    assert summary(["passed", "skipped: no torchvision"]) == "skipped: no torchvision"
    assert summary([]) == "no test"


@pytest.mark.parametrize(
    ("module", "test", "given", "cell"),
    [
        (
            "test_picture_tasks",
            "test_a_job_in_a_batch_has_the_bits_it_has_alone",
            {"task": "sdxl inpaint"},
            ("sdxl", "inpaint", "batched"),
        ),
        (
            "test_video_families",
            "test_a_killed_loop_ends_with_the_bits_of_the_undisturbed_run",
            {"case": "wan22-vace"},
            ("wan22-vace", "video-conditioning", "resumed"),
        ),
        (
            "test_checkpoints",
            "test_every_family_ends_with_the_bits_of_the_undisturbed_run",
            {"name": "flux"},
            ("flux", "text-to-image", "resumed"),
        ),
        ("test_families", "test_inspect_finds_a_familys_files_whole", {"case": "flux"}, None),
    ],
)
def test_a_test_belongs_to_its_familys_task(
    module: str, test: str, given: dict[str, str], cell: object
) -> None:
    item = SimpleNamespace(
        originalname=test,
        callspec=SimpleNamespace(params=given),
        path=SimpleNamespace(stem=module),
    )
    assert cell_of(item) == cell


def test_a_task_without_results_is_listed_as_such() -> None:
    row = next(line for line in table({}).splitlines() if line.startswith("| wan-i2v | first"))
    assert row.count("no test") == 3

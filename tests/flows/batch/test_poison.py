"""Rows that fail or kill their stage process cost themselves alone."""

from __future__ import annotations

import pytest

from flows.batch.errors import BatchStopped
from tests.flows.batch.conftest import Nights
from tests.support.poison import ENVIRON, FAILS, KILLS, KILLS_ONCE

__all__ = ["ENVIRON"]  # what the module's fork server starts with


def test_poison_costs_its_own_row_and_a_crash_one_more_try(nights: Nights) -> None:
    rows = {"one": "a fox", "fails": FAILS, "kills": KILLS, "once": KILLS_ONCE, "two": "an owl"}
    nights.write([{"id": name, "prompt": text, "seed": 1} for name, text in rows.items()])
    ran = nights.run()
    assert {name: row.status for name, row in ran.rows.items()} == {
        "one": "done",
        "fails": "failed",
        "kills": "failed",
        "once": "done",
        "two": "done",
    }
    fails, kills = ran.rows["fails"], ran.rows["kills"]
    assert (fails.error_type, fails.phase, fails.attempts) == ("StageFailed", "denoise", 1)
    assert "this row is poison" in (fails.error or "")
    assert (kills.error_type, kills.phase, kills.attempts) == ("StageCrashed", "denoise", 2)
    assert ran.rows["once"].attempts == 2
    # Each death costs one process: twice for the one that kills, once for the other.
    assert ran.started == {"inspect": 1, "encode": 1, "denoise": 4, "decode": 1}
    assert ran.ran == {"inspect": 1, "encode": 5, "denoise": 3, "decode": 3}
    assert (ran.summary.num_done, ran.summary.num_failed) == (3, 2)

    again = nights.run()
    assert (again.started, again.summary.num_run) == ({}, 0)
    assert again.rows == ran.rows
    retried = nights.run(retry="failed")
    assert (retried.summary.num_run, retried.started) == (2, {"denoise": 2})


def test_too_many_failures_end_the_batch_with_its_results_written(nights: Nights) -> None:
    from flows.batch import results

    nights.write([{"id": str(n), "prompt": FAILS, "seed": n} for n in range(4)])
    with pytest.raises(BatchStopped, match=r"2 rows have failed, the last one, 1, .*poison"):
        nights.run(max_failures=2)
    kept = results.read(nights.output / results.NAME)
    assert [row.status for row in kept] == ["failed", "failed"]

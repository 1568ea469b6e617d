"""Whole batches: real stage processes, a real Prefect server, a tiny model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flows.batch import page
from flows.batch.shared_phase import AHEAD
from flows.locks import FlockLockManager
from flows.prefect_api import PrefectApi
from stages.errors import ArtifactError, RequestError
from stages.media import read_settings
from tests.flows.batch.conftest import Nights
from tests.support.studio import TINY

ONE_EACH = {"inspect": 1, "encode": 1, "denoise": 1, "decode": 1}


def test_every_good_row_has_its_picture_and_a_bad_row_is_a_result(nights: Nights) -> None:
    nights.write(
        [
            {"id": "fox", "prompt": "a red fox", "seed": 1},
            {"id": "fox-again", "prompt": "a red fox", "seed": 2},
            {"id": "bad", "prompt": "a red fox", "seed": 3, "height": 77},
            {"id": "owl", "prompt": "an owl", "negative_prompt": "blur", "guidance_scale": 3.0},
        ]
    )
    ran = nights.run(name="{seed}-{prompt}")
    assert ran.started == ONE_EACH
    assert ran.ran == {"inspect": 1, "encode": 2, "denoise": 3, "decode": 3}  # equal prompts once
    assert {name: row.status for name, row in ran.rows.items()} == {
        "fox": "done",
        "fox-again": "done",
        "bad": "invalid",
        "owl": "done",
    }
    assert "77" in (ran.rows["bad"].error or "")
    assert (ran.summary.num_done, ran.summary.num_invalid, ran.summary.num_run) == (3, 1, 3)

    fox = ran.rows["fox"]
    assert fox.file == "1-a-red-fox.png"
    path = nights.output / fox.file
    assert hashlib.sha256(path.read_bytes()).hexdigest() == fox.file_sha256
    assert read_settings(path).seed == fox.seed == 1
    assert read_settings(path).row_id == "fox"
    assert set(fox.seconds) == set(fox.requests) == {"encode", "denoise", "decode"}
    assert set(fox.digests) == {"encode.prompt_embeds", "denoise.latents", "decode.image-0"}
    assert fox.peak_host_bytes and not fox.cached and fox.attempts == 1
    assert "encode" not in ran.rows["fox-again"].seconds
    owl = ran.rows["owl"]
    assert (owl.negative_prompt, owl.guidance_scale) == ("blur", 3.0)
    assert sorted(p.name for p in nights.output.iterdir()) == sorted(
        [*(row.file for row in ran.rows.values() if row.file), "batch.jsonl", "results.parquet"]
    )


def test_the_page_of_a_batch_has_its_progress_and_its_rows(
    nights: Nights, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brought up to date while it runs, and not once for every row."""
    monkeypatch.setattr(page, "EVERY_S", 0.0)
    nights.write([{"prompt": "an owl", "height": 77}] + [{"prompt": f"fox {n}"} for n in range(4)])
    ran = nights.run(arguments={"num_inference_steps": 1})
    run_id = ran.rows["000002"].run_id
    wanted = {"flow_runs": {"id": {"any_": [run_id]}}}
    found = PrefectApi(prefect_server, {}).call("POST", "/artifacts/filter", wanted)
    shown = {each["key"]: each for each in found if not each["task_run_id"]}
    assert len(found) == len(shown) and set(shown) == {"progress-batch", "rows"}
    assert shown["progress-batch"]["data"] == 100.0
    assert shown["rows"]["description"] == "4 done, 1 invalid"
    table = json.loads(shown["rows"]["data"])
    assert [line["status"] for line in table] == ["invalid"] + ["done"] * 4
    assert "77" in table[0]["file or error"] and table[1]["file or error"] == "000002.png"


def test_a_second_start_redoes_nothing_and_writes_a_lost_picture_from_the_store(
    nights: Nights,
) -> None:
    nights.write([{"prompt": f"a number {n}"} for n in range(3)])
    first = nights.run()
    before = {path.name: path.stat().st_mtime_ns for path in nights.output.glob("*.png")}
    again = nights.run()
    assert (again.started, again.ran, again.summary.num_run) == ({}, {}, 0)
    assert again.rows == first.rows
    assert before == {path.name: path.stat().st_mtime_ns for path in nights.output.glob("*.png")}

    lost = first.rows["000002"]
    content = (nights.output / str(lost.file)).read_bytes()
    (nights.output / str(lost.file)).unlink()
    third = nights.run()
    assert (third.started, third.summary.num_run) == ({}, 1)
    assert (nights.output / str(lost.file)).read_bytes() == content  # its seed was drawn, too
    assert third.rows["000002"].cached and not lost.cached


def test_chunks_take_one_process_a_phase_each_and_keep_the_order_of_the_table(
    nights: Nights,
) -> None:
    nights.write([{"prompt": "the same", "seed": n} for n in range(5)])
    ran = nights.run(chunk=2)
    assert ran.started == {"inspect": 1, "encode": 1, "denoise": 3, "decode": 3}
    assert [row.seed for row in ran.rows.values()] == [0, 1, 2, 3, 4]


def test_a_batch_and_single_runs_share_their_results_both_ways(nights: Nights) -> None:
    from flows.z_image import z_image

    shared = {"prompt": "a shared fox", "seed": 5, "guidance_scale": 2.0}
    nights.write([shared, {"prompt": "a fox of the batch", "seed": 6}])
    singles = TINY | {"model": str(nights.model), "device": "cpu"}
    singles |= {"output": str(nights.output.parent / "singles")}
    (single,) = z_image(**shared, **singles)
    ran = nights.run()
    assert ran.ran == {"encode": 1, "denoise": 1, "decode": 1}
    assert ran.rows["000001"].cached
    assert ran.rows["000001"].picture_sha256 == single.digest
    before = len(nights.reports())
    (own,) = z_image(prompt="a fox of the batch", seed=6, **singles)
    assert own.digest == ran.rows["000002"].picture_sha256
    assert len(nights.reports()) == before


def test_rows_that_two_batches_have_in_common_are_computed_once(nights: Nights) -> None:
    rows = [{"prompt": f"a number {n}", "seed": n} for n in range(4)]
    nights.write(rows[:3])
    first = nights.run()
    nights.write(rows[1:])
    nights.output = nights.output.with_name("another folder")
    second = nights.run()
    assert second.ran == {"encode": 1, "denoise": 1, "decode": 1}
    assert [row.cached for row in second.rows.values()] == [True, True, False]
    assert second.rows["000001"].picture_sha256 == first.rows["000002"].picture_sha256


def test_rows_with_and_without_a_picture_go_through_one_batch(
    nights: Nights, tmp_path: Path
) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    picture = str(tmp_path / "red.png")
    nights.write(
        [
            {"id": "plain", "prompt": "a fox", "seed": 1},
            {"id": "red", "prompt": "a fox", "seed": 1, "image": picture, "strength": 0.7},
            {"id": "gone", "prompt": "a fox", "seed": 1, "image": str(tmp_path / "gone.png")},
        ]
    )
    ran = nights.run()
    assert ran.ran["condition"] == 1 and ran.started["denoise"] == 1
    assert {name: row.status for name, row in ran.rows.items()} == {
        "plain": "done",
        "red": "done",
        "gone": "invalid",
    }
    assert "gone.png" in (ran.rows["gone"].error or "")
    assert read_settings(nights.output / "red.png").strength == 0.7
    assert ran.rows["red"].picture_sha256 != ran.rows["plain"].picture_sha256


def test_a_strict_batch_with_a_bad_row_runs_nothing(nights: Nights) -> None:
    nights.write([{"prompt": "a fox"}, {"prompt": "a fox", "height": 77}])
    with pytest.raises(RequestError, match=r"1 of 2 rows cannot run: .* row 2: height 77"):
        nights.run(strict=True)
    assert not nights.reports()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunk": 0}, "chunk is 0, allowed are 1 to 5000"),
        ({"max_failures": 0}, "max_failures is 0"),
        ({"arguments": {"output": "x"}}, "arguments has output, which z-image does not take"),
        ({"arguments": {"num_images": 2}}, "arguments has num_images"),
        ({"family": "zimage"}, "family is 'zimage', known are"),
    ],
)
def test_what_a_batch_cannot_use_is_named_before_it_begins(
    nights: Nights, options: dict[str, Any], told: str
) -> None:
    nights.write([{"prompt": "a fox"}])
    with pytest.raises(RequestError, match=told):
        nights.run(**options)
    assert not nights.reports()


def test_a_stranger_s_file_under_a_row_s_name_stays(nights: Nights) -> None:
    nights.write([{"id": "fox", "prompt": "a fox"}])
    nights.output.mkdir()
    (nights.output / "fox.png").write_bytes(b"mine")
    with pytest.raises(RequestError, match=r"fox\.png"):
        nights.run()
    assert (nights.output / "fox.png").read_bytes() == b"mine"
    assert nights.run(overwrite=True).rows["fox"].status == "done"


def test_a_retry_of_the_flow_run_goes_on_with_the_rows_that_are_left(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk of the first try may be answered out of Prefect's memory: its rows are others."""
    from flows.batch.passes import Passes

    run_chunk, sizes = Passes.run_chunk, list[int]()

    def fails_once(self: Passes, rows: Any) -> None:
        sizes.append(len(rows))
        if len(sizes) == 2:
            raise ArtifactError("the store's disk is full")
        run_chunk(self, rows)

    monkeypatch.setattr(Passes, "run_chunk", fails_once)
    nights.write([{"prompt": "the same", "seed": n} for n in range(5)])
    ran = nights.run(chunk=2, tries=2)
    assert sizes == [2, 2, 2, 1]
    assert ran.summary.num_done == 5
    assert ran.ran["denoise"] == 5


def test_a_row_whose_artifact_is_gone_begins_again(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.session import StageSession

    rest, is_first = StageSession.rest, [True]

    def rest_and_lose(self: StageSession) -> None:
        rest(self)
        if self.stage == "encode" and is_first.pop():
            is_first.append(False)
            for path in (nights.home / "store" / "objects").rglob("?" * 64):
                if path.stat().st_size > 2_000:  # the embeddings, and not what inspect found
                    path.unlink()

    monkeypatch.setattr(StageSession, "rest", rest_and_lose)
    nights.write([{"prompt": "a fox", "seed": 1}, {"prompt": "an owl", "seed": 2}])
    ran = nights.run()
    assert [row.status for row in ran.rows.values()] == ["done", "done"]
    assert ran.ran["encode"] == 4 and ran.ran["decode"] == 2


def test_a_server_that_fails_ends_the_batch_and_no_row_is_blamed(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from flows.batch import results
    from flows.batch.shared_phase import SharedPhase
    from flows.prefect_api import ServerError

    def fails(self: Any, *args: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(SharedPhase, "_run_task", fails)
    nights.write([{"id": "fox", "prompt": "a fox"}])
    with pytest.raises(ServerError, match=r"while row fox was at work.*connection refused"):
        nights.run()
    assert results.read(nights.output / results.NAME) == []
    monkeypatch.undo()
    monkeypatch.setenv("EXEUNT_HOME", str(nights.home))
    assert nights.run().summary.num_done == 1


def test_a_batch_leaves_what_its_page_shows(nights: Nights) -> None:
    from flows.batch import results
    from flows.reports.of_batch import batch_report

    reports = nights.home / "reports"
    rows = [
        {"id": "fox", "prompt": "a fox", "seed": 1},
        {"id": "tall", "prompt": "x", "height": 77},
    ]
    nights.write([*rows, {"id": "again", "prompt": "a fox", "seed": 1}])
    nights.run()
    report = batch_report(nights.output, reports)
    fox, tall, again = report.items
    assert [each.status for each in report.items] == ["done", "invalid", "done"]
    assert fox.settings["seed"] == 1 and fox.parameters and again.is_cached
    assert "77" in tall.error and report.failures[0].what == "tall"
    assert {t.stage: (t.num_made, t.num_found) for t in report.totals}["denoise"] == (1, 1)
    (disk,) = [each for each in report.forecast if each.name == "disk, all rows"]
    assert disk.share.endswith("%")

    nights.run()  # nothing is left to run; the forecast of the rows stays
    about = results.read_about(nights.output / results.NAME)
    assert about["forecast"]["run_id"] != about["run_id"]
    assert batch_report(nights.output, reports).forecast == report.forecast


def test_a_result_that_another_run_is_making_is_not_made_ahead_of_its_turn(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.batch.ahead import AheadSession

    sent: list[str] = []
    send = AheadSession.send_ahead

    def noted(self: AheadSession, request: Any, context: Any) -> None:
        sent.append(request.stage)
        send(self, request, context)

    monkeypatch.setattr(AheadSession, "send_ahead", noted)
    nights.write([{"prompt": "the same", "seed": n} for n in range(3)])
    assert nights.run().summary.num_done == 3
    assert sent.count("denoise") == 3 and sent.count("decode") == 3
    assert not list((nights.home / "locks").glob("*.lock"))

    sent.clear()
    nights.write([{"prompt": "the same", "seed": n} for n in range(10, 13)])
    monkeypatch.setattr(FlockLockManager, "acquire_lock", _refuses_ahead)
    assert nights.run(overwrite=True).summary.num_done == 3
    assert sent == []


_acquire_lock = FlockLockManager.acquire_lock


def _refuses_ahead(self: FlockLockManager, key: str, holder: str, *args: Any, **more: Any) -> bool:
    return holder != AHEAD and _acquire_lock(self, key, holder, *args, **more)

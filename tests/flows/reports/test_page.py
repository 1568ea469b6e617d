"""The page holds every text as text, needs nothing but itself, and says what it is."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from flows.reports.charts import bars, duration, memory_chart, size
from flows.reports.data import Failure, Item, Report
from flows.reports.of_run import run_report
from flows.reports.page import page, write_page
from flows.reports.thumbnails import EDGE, thumbnails
from stages.errors import RequestError
from tests.support.report_runs import BEGAN, RecordedRun, stage_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202eRTL\u2028🦊"


def items_in(html: str) -> list[dict[str, object]]:
    """What the page's own script reads."""
    found = re.search(r'<script type="application/json" id="items">(.*?)</script>', html, re.S)
    assert found is not None
    return list(json.loads(found[1]))


def report_with(**fields: object) -> Report:
    empty = Report(title="t", run_id="r", state="finished", begin=BEGAN, end=BEGAN + 5, facts={})
    return replace(empty, **fields)  # type: ignore[arg-type]


def test_no_text_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    item = Item(name=EVIL, path=None, prompt=EVIL, error=EVIL, settings={"prompt": EVIL})
    html = page(
        report_with(
            title=EVIL,
            facts={EVIL: EVIL},
            items=[replace(item, parameters=EVIL, row_id=EVIL, status="failed")],
            failures=[Failure(what=EVIL, stage="denoise", kind="StageFailed", reason=EVIL)],
            warnings={EVIL: 2},
            fallbacks={EVIL: 1},
        ),
        tmp_path,
    )
    assert html.count("<script") == 2 and html.count("</script>") == 2  # the data, and our own
    assert "<img src=x" not in html
    (shown,) = items_in(html)
    assert shown["prompt"] == shown["parameters"] == shown["row"] == EVIL
    assert json.loads(str(shown["settings"]))["prompt"] == EVIL


def test_the_page_may_run_its_own_script_alone(tmp_path: Path) -> None:
    html = page(report_with(), tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    text = policy[1].replace("&#39;", "'")
    assert "default-src 'none'" in text and "unsafe" not in text and "http" not in text
    assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", html)


def test_links_are_relative_and_never_a_scheme(tmp_path: Path) -> None:
    names = ["javascript:alert(1).png", "ü #1?.png", "sub/100%.png"]
    items = [Item(name=name, path=tmp_path / "out" / name, prompt="") for name in names]
    hrefs = [each["href"] for each in items_in(page(report_with(items=items), tmp_path / "out"))]
    assert hrefs == [
        "./javascript%3Aalert%281%29.png",
        "./%C3%BC%20%231%3F.png",
        "./sub/100%25.png",
    ]


def test_a_seed_of_twenty_digits_stays_exact(tmp_path: Path) -> None:
    items = [Item(name="a", path=None, seed=2**64 - 1)]
    (shown,) = items_in(page(report_with(items=items), tmp_path))
    assert shown["seed"] == "18446744073709551615"


def test_embedded_pictures_are_the_files_themselves(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    path = run.picture("a.png", "a fox", size=40)
    (shown,) = items_in(page(run_report(run.folder), tmp_path, embed=True))
    kind, _, data = str(shown["href"]).partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data) == path.read_bytes()


def test_a_thumbnail_is_small_and_keeps_the_shape(tmp_path: Path) -> None:
    Image.new("RGB", (1200, 300), "red").save(tmp_path / "wide.png")
    item = Item(name="wide", path=tmp_path / "wide.png", media_type="image/png")
    (made,) = thumbnails([item])
    small = Image.open(io.BytesIO(base64.b64decode(made.url.partition(",")[2])))
    assert small.size == (EDGE, EDGE // 4) and (made.width, made.height) == (1200, 300)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "I;16", "CMYK", "1", "LA"])
def test_every_kind_of_picture_has_a_thumbnail(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new(mode, (20, 20)).save(path)
    (made,) = thumbnails([Item(name="a", path=path, media_type="image/png")])
    assert made.url.startswith("data:image/webp;base64,")


def test_a_file_that_cannot_be_shown_says_why(tmp_path: Path) -> None:
    (tmp_path / "noise.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    items = [
        Item(name=name, path=tmp_path / name, media_type="image/png")
        for name in ("noise.png", "gone.png")
    ]
    shown = items_in(page(report_with(items=items), tmp_path))
    assert [each["error"] for each in shown] == [
        "the file is no picture that can be read",
        "the file is gone",
    ]


def test_bars_are_to_one_scale_and_lines_lie_in_their_chart(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.report(stage_report("encode"))
    run.report(stage_report("denoise", began=BEGAN + 4, elapsed_s=8.0))
    report = run_report(run.folder)
    widths = [sum(piece.width for piece in bar.pieces) for bar in bars(report.totals)]
    assert widths == [pytest.approx(500), pytest.approx(1000)]
    chart = memory_chart(report)
    assert chart is not None
    (curve,) = chart.curves
    points = [tuple(map(float, p.split(","))) for p in " ".join(curve.polylines).split()]
    assert all(0 <= x <= 1000 and 0 <= y <= 200 for x, y in points)
    assert curve.peak == "700 B" and list(chart.bytes_axis) == ["800 B", "400 B", "0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.004, "0.00 s"),
        (9.99, "9.99 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (7384, "2 h 03 min"),
    ],
)
def test_durations_for_people(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (23 << 30, "23 GiB")]
)
def test_sizes_for_people(value: int, text: str) -> None:
    assert size(value) == text


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot be written to .*--output"):
        write_page(report_with(), tmp_path / "file" / "report.html")


def test_a_run_that_found_every_result_has_a_page(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.journal.write("phase_begins", stage="decode", num_requests=1)
    run.request("decode", "a", cached=True, elapsed_s=0.1)
    run.journal.write("phase_ends", stage="decode")
    run.picture("a.png", "a fox", digest="a")
    html = page(run_report(run.folder), run.pictures)
    (row,) = re.findall(r'<tr><th scope="row">decode</th>.*?</tr>', html, re.S)
    cells = re.findall(r'<td class="number">(.*?)</td>', row)
    assert cells == ["0", "1", "", "", "", ""]
    assert items_in(html)[0]["cached"] is True

"""A page of 1,000 pictures in a real browser: what is shown, keys, sizes, themes, no network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flows.batch import results
from flows.media_server import MediaServer
from flows.reports.of_batch import batch_report
from flows.reports.page import write_page
from stages.artifacts import ArtifactStore
from stages.mp4 import encode_mp4
from tests.support.browser import Page, browser, find_browser
from tests.support.report_rows import failed_row, good_row
from tests.support.report_runs import RUN_ID, RecordedRun, stage_report

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")

NUM = 1000
FAILED = (40, 41, 999, 1000, 500, 501, 502)
SHOWN = "document.querySelectorAll('#gallery li').length"
COUNT = "document.getElementById('count').textContent"
FOCUS = "Number(document.activeElement.dataset.index)"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
GROUND = "getComputedStyle(document.documentElement).backgroundColor"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a batch of 1,000 rows, a few of which failed."""
    run = RecordedRun(tmp_path_factory.mktemp("thousand"))
    rows = []
    for number in range(1, NUM + 1):
        prompt = ("a red fox", "an owl in the rain")[number % 2] + f", take {number}"
        if number in FAILED:
            rows.append(failed_row(number, prompt=prompt))
            continue
        seed = 2**64 - number  # a browser's own numbers take neighbours for one
        run.picture(f"{number:06d}.png", prompt, seed=seed, digest=f"{number}", size=32)
        rows.append(good_row(number, prompt=prompt, seed=seed, picture_sha256=f"{number}"))
    run.report(stage_report("denoise"))
    about = {"family": "z-image", "table": "night.csv", "num_rows": NUM, "run_id": RUN_ID}
    results.write(run.pictures, rows, about)
    (run.pictures / "000003.png").unlink()
    report = batch_report(run.pictures, run.reports)
    return write_page(report, run.pictures / "report.html").as_uri()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture
def page(window: Page, address: str) -> Page:
    window.open(address)
    assert window.run(SHOWN) == NUM
    return window


def choose(page: Page, name: str, value: str) -> None:
    page.run(
        f"{{ const it = document.getElementById('{name}'); it.value = '{value}'; "
        "it.dispatchEvent(new Event(it.tagName === 'INPUT' ? 'input' : 'change')); }"
    )


def test_it_asks_for_nothing_but_itself(page: Page, address: str) -> None:
    page.run("window.scrollTo(0, document.body.scrollHeight)")
    page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert page.requests() == [address] and page.complaints() == []


def test_thumbnails_are_decoded_when_they_come_near(page: Page) -> None:
    """A thousand at a time would freeze the page."""
    page.wait_for("document.querySelectorAll('.frame img[src]').length > 0")
    assert page.run("document.querySelectorAll('.frame img[src]').length") < NUM / 4
    page.run("document.querySelectorAll('#gallery li')[899].scrollIntoView()")
    page.wait_for("document.querySelector('img[data-index=\"899\"]').naturalWidth > 0")


def test_search_and_filters_work_together(page: Page) -> None:
    choose(page, "search", "OWL  00099")
    page.wait_for(f"{SHOWN} === 6")  # rows 99, 991, 993, 995, 997 and 999
    assert page.run(COUNT) == "6 of 1,000 shown."
    choose(page, "status", "failed")
    assert page.run(SHOWN) == 1
    choose(page, "search", "")
    page.wait_for(f"{SHOWN} === {len(FAILED)}")
    choose(page, "search", "no such thing")
    page.wait_for(f"{SHOWN} === 0")
    assert page.complaints() == []


def test_seeds_of_twenty_digits_are_in_order(page: Page) -> None:
    choose(page, "search", "owl")
    page.wait_for(f"{SHOWN} < {NUM}")
    choose(page, "status", "done")
    choose(page, "order", "seed")
    first = page.run("document.querySelector('#gallery .card').getAttribute('aria-label')")
    assert "take 997" in first and f"seed {2**64 - 997}" in first


def test_few_failures_stand_above_the_gallery_and_all_can_be_seen(page: Page) -> None:
    rows = "document.querySelectorAll('.failures tbody tr')"
    assert page.run(f"{rows}.length") == len(FAILED)
    assert page.run(f"[...{rows}].filter((row) => row.checkVisibility()).length") == 5
    page.run("document.querySelector('summary').click()")
    page.wait_for(f"[...{rows}].every((row) => row.checkVisibility())")


def test_the_keyboard_is_enough(page: Page) -> None:
    page.run("document.getElementById('order').focus()")
    page.press("Tab")
    assert page.run(FOCUS) == 0
    page.press("ArrowRight")
    assert page.run(FOCUS) == 1
    page.press("ArrowDown")
    below = page.run(FOCUS)
    assert below > 2
    page.press("ArrowUp")
    page.press("End")
    assert page.run(FOCUS) == NUM - 1
    page.press("Home")
    page.press("Enter")
    page.wait_for("document.getElementById('viewer').open")
    page.wait_for("document.querySelector('#stand img').naturalWidth === 32")
    page.press("ArrowRight")
    assert page.run("document.getElementById('viewer-title').textContent") == "000002.png"
    page.press("z")
    assert page.run("document.getElementById('zoom').getAttribute('aria-pressed')") == "true"
    page.press("Escape")
    page.wait_for("!document.getElementById('viewer').open")
    assert page.run(FOCUS) == 1, "the focus is where the viewer was left"


def test_a_file_that_is_gone_and_a_row_that_failed_say_so(page: Page) -> None:
    for index, told in (
        (2, "The file is not where it was."),
        (39, "StageFailed: latents are NaN at step 3"),
    ):
        page.run(f"document.querySelectorAll('.card')[{index}].click()")
        page.wait_for(f"document.getElementById('viewer-note').textContent.includes('{told}')")
        page.press("Escape")
        page.wait_for("!document.getElementById('viewer').open")


def test_settings_are_copied_whole(page: Page) -> None:
    page.run("document.querySelectorAll('.card')[6].click()")
    page.run(
        "document.execCommand = () => { window.copied = "
        "document.querySelector('textarea').value; return true; };"
        "Object.defineProperty(navigator, 'clipboard', {value: undefined})"
    )
    page.run("document.getElementById('copy-json').click()")
    page.wait_for("document.getElementById('copied').textContent === 'Copied.'")
    assert f'"seed": {2**64 - 7}' in page.run("window.copied")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_never_scrolls_sideways(window: Page, address: str, scheme: str) -> None:
    window.open(address, width=375, height=812, scheme=scheme)
    assert window.run(WIDE) == 0
    window.run("document.querySelector('.card').click()")
    window.wait_for("document.getElementById('viewer').open")
    assert window.run(WIDE) == 0
    buttons = "[...document.querySelectorAll('dialog button')]"
    assert window.run(f"{buttons}.every((it) => it.getBoundingClientRect().right <= 375)")
    assert window.run(f"{buttons}.every((it) => it.getBoundingClientRect().height >= 38)")


def test_the_theme_follows_the_system_until_the_reader_chooses(window: Page, address: str) -> None:
    window.open(address)
    light = window.run(GROUND)
    window.open(address, scheme="dark")
    dark = window.run(GROUND)
    assert light != dark
    theme = "document.getElementById('theme')"
    window.run(f"{theme}.click()")
    assert window.run(f"{theme}.textContent") == "Theme: light" and window.run(GROUND) == light
    window.run(f"{theme}.click(); {theme}.click()")
    assert window.run(GROUND) == dark


def test_a_clip_of_the_server_of_pictures_plays(window: Page, tmp_path: Path) -> None:
    """Its headers forbid all but what a browser's own page around a clip needs."""
    store = ArtifactStore(tmp_path / "store")
    frames = (np.full((32, 32, 3), 10 * number, np.uint8) for number in range(8))
    clip = store.put(encode_mp4(frames, 8), "video/mp4")
    with MediaServer(store) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            window.open(f"http://127.0.0.1:{server.server_port}/media/{clip.digest}")
            window.wait_for("document.querySelector('video').readyState === 4")
            assert window.complaints() == []
        finally:
            server.shutdown()
            thread.join()

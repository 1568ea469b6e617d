"""A page of 1,000 pictures in a real browser: how long it takes to make, to load and to filter.

    python -m tests.benchmarks.report_page [--num 1000] [--folder DIR]

Prints JSON: seconds, bytes, and the longest time for which the page did not answer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flows.batch import results
from flows.reports.of_batch import batch_report
from flows.reports.page import write_page
from tests.support.browser import Page, browser
from tests.support.report_rows import failed_row, good_row
from tests.support.report_runs import BEGAN, RUN_ID, RecordedRun, stage_report

EDGE = 512
SUBJECTS = ("a red fox", "an owl in the rain", "a harbour at night", "two chairs", "a lemon tree")
STYLES = ("watercolour", "linocut", "studio photograph", "pencil on grey paper")

# Runs in the page before its own scripts: the longest pause between two turns of its loop.
WATCH = """
window.longest = 0; window.last = performance.now();
setInterval(() => { const now = performance.now();
  window.longest = Math.max(window.longest, now - window.last - 10); window.last = now; }, 10);
"""

# The time from an input until the frame after it has been painted.
FILTER = """
(async (text) => {
  const search = document.getElementById("search"), began = performance.now();
  window.longest = 0;
  search.value = text;
  search.dispatchEvent(new Event("input"));
  const before = document.getElementById("count").textContent;
  while (document.getElementById("count").textContent === before)
    await new Promise((done) => requestAnimationFrame(done));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return {ms: performance.now() - began, longest_ms: window.longest,
          shown: document.querySelectorAll("#gallery li").length};
})(%s)
"""


def picture(number: int) -> Image.Image:
    """Soft colours and some grain: as hard to compress as a photograph, and to tell apart."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    soft = np.asarray(small.resize((EDGE, EDGE), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-6, 7, (EDGE, EDGE, 1), dtype=np.int16)
    return Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8))


def make(root: Path, num: int) -> tuple[Path, Path]:
    """A batch of `num` rows, one of forty failed; its output folder, and the reports'."""
    run = RecordedRun(root)
    rows = []
    for number in range(1, num + 1):
        prompt = f"{SUBJECTS[number % 5]}, {STYLES[number // 5 % 4]}, take {number}"
        name, digest = f"{number:06d}.png", f"{number:064x}"
        began = BEGAN + 5.0 * number
        if number % 40 == 0:
            rows.append(failed_row(number, prompt=prompt))
            continue
        picture(number).save(run.pictures / name, compress_level=1)
        run.note(run.pictures / name, prompt, seed=number * 7919, digest=digest)
        run.report(stage_report("denoise", began=began, steps={"median_s": 0.2}))
        rows.append(good_row(number, prompt=prompt, seed=number * 7919, picture_sha256=digest))
    about = {"family": "z-image", "table": "thousand.csv", "num_rows": num, "run_id": RUN_ID}
    results.write(run.pictures, rows, about)
    return run.pictures, run.reports


def measure(page: Page, url: str) -> dict[str, Any]:
    """Open the page, scroll through it and filter it."""
    page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    began = time.perf_counter()
    page.open(url)
    page.wait_for("document.querySelectorAll('#gallery li').length > 0")
    loaded_s = time.perf_counter() - began
    longest_ms = page.run("window.longest")
    found = {text or "all": page.run(FILTER % json.dumps(text)) for text in ("owl rain", "7", "")}
    page.run("window.longest = 0")
    for share in range(1, 11):
        page.run(f"window.scrollTo(0, document.body.scrollHeight * {share} / 10)")
        page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
    return {
        "load_s": round(loaded_s, 2),
        "load_longest_pause_ms": round(longest_ms),
        "filter": found,
        "scroll_longest_pause_ms": round(page.run("window.longest")),
        "heap_mb": round(page.run("performance.memory.usedJSHeapSize") / 1e6, 1),
        "complaints": page.complaints(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        root = options.folder or Path(scratch)
        output, reports = make(root, options.num)
        began = time.perf_counter()
        path = write_page(batch_report(output, reports), output / "report.html")
        told = {"num": options.num, "make_s": round(time.perf_counter() - began, 2)}
        told["page_mb"] = round(path.stat().st_size / 1e6, 1)
        with browser(Path(scratch) / "profile") as page:
            print(json.dumps(told | measure(page, path.as_uri()), indent=1))


if __name__ == "__main__":
    main()

"""What rows of a model have cost before, out of the journals of earlier runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any

from flows.batch.rows import Work
from flows.reports.journal import NAME
from stages.artifacts import open_store

MOST_RUNS = 20
"""The newest runs of a model; older ones say what an older machine or version took."""

MOST_LINES = 4_000
"""Of one journal: a thousand rows."""

MOST_REPORTS = 12
"""Of one run, for its peaks of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One stage of one picture.

    Attributes:
        seconds: None if its result was found.
        nbytes: Of its artifact; None if it is gone.
    """

    stage: str
    work: Work
    seconds: float | None
    nbytes: int | None


class Past:
    """Samples of a model, and what they say of other work.

    Args:
        samples: Of earlier runs with the same model, dtype and device.
        peak_host_bytes: Largest resident memory of any stage process; 0 if none is known.
    """

    def __init__(self, samples: Iterable[Sample] = (), peak_host_bytes: int = 0) -> None:
        self._samples = list(samples)
        self.peak_host_bytes = peak_host_bytes
        self.num_samples = len(self._samples)

    @property
    def stages(self) -> list[str]:
        """The stages that left samples."""
        return sorted({sample.stage for sample in self._samples})

    def seconds(self, stage: str, work: Work) -> float | None:
        """Seconds of one row in a stage; None if nothing is known.

        Rows of other sizes count in proportion to pixels, those of other steps to steps: so
        larger pictures are underestimated where attention rules.
        """
        known = [
            (sample.work, sample.seconds * _effort(stage, work) / _effort(stage, sample.work))
            for sample in self._samples
            if sample.stage == stage and sample.seconds is not None
        ]
        return _of_the_nearest(known, work)

    def nbytes(self, stage: str, work: Work) -> int | None:
        """Bytes of one row's artifact of a stage; None if nothing is known."""
        known = [
            (sample.work, sample.nbytes * _pixels(stage, work) / _pixels(stage, sample.work))
            for sample in self._samples
            if sample.stage == stage and sample.nbytes is not None
        ]
        found = _of_the_nearest(known, work)
        return None if found is None else round(found)


def _effort(stage: str, work: Work) -> float:
    passes = 2 if work.is_guided and stage in ("encode", "denoise") else 1
    steps = work.num_inference_steps if stage == "denoise" else 1
    return _pixels(stage, work) * steps * passes


def _pixels(stage: str, work: Work) -> int:
    return 1 if stage == "encode" else work.height * work.width * work.num_frames


def _of_the_nearest(known: list[tuple[Work, float]], work: Work) -> float | None:
    """The median of the values whose work has the same size, else of all."""
    same = [value for other, value in known if _pixels("", other) == _pixels("", work)]
    values = same or [value for _, value in known]
    return statistics.median(values) if values else None


def read_past(
    reports: Path, *, store_url: str, family: str, model: str, dtype: str, device: str
) -> Past:
    """What earlier runs with this model left in their journals.

    Args:
        reports: The folder of all runs' reports; need not exist.
    """
    wanted = {"family": family, "model": model, "dtype": dtype, "device": device}
    store = open_store(store_url)
    samples: list[Sample] = []
    peak, num_runs = 0, 0
    for journal in _newest(reports.glob(f"*/{NAME}")):
        lines = _documents(journal)
        head = next(lines, {})
        if any(head.get(name) != value for name, value in wanted.items()):
            continue
        found = list(_samples(lines, store.size))
        if found:
            samples += found
            peak = max(peak, _peak(journal.parent))
            num_runs += 1
        if num_runs == MOST_RUNS:
            break
    return Past(samples, peak)


def _newest(paths: Iterable[Path]) -> list[Path]:
    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    return nlargest(10 * MOST_RUNS, paths, key=age)


def _documents(journal: Path) -> Iterator[dict[str, Any]]:
    try:
        with journal.open("rb") as file:
            for line in islice(file, MOST_LINES):
                try:
                    document = json.loads(line)
                except ValueError:
                    continue
                if isinstance(document, dict):
                    yield document
    except OSError:
        return


def _samples(lines: Iterable[Mapping[str, Any]], size: Any) -> Iterator[Sample]:
    seconds: dict[str, float] = {}  # by the artifact's digest
    for line in lines:
        try:
            if line["event"] == "request" and not line["cached"]:
                for digest in line["artifacts"].values():
                    seconds[digest] = line["elapsed_s"]
            elif line["event"] == "item":
                yield from _of_item(line["settings"], seconds, size)
        except (KeyError, TypeError, AttributeError):
            continue  # of another version


def _of_item(
    settings: Mapping[str, Any], seconds: Mapping[str, float], size: Any
) -> Iterator[Sample]:
    work = Work(
        height=settings["height"],
        width=settings["width"],
        num_frames=settings.get("num_frames") or 1,
        num_inference_steps=settings["num_inference_steps"],
        is_guided=settings["guidance_scale"] > 1,
    )
    for name, digest in settings["artifacts"].items():
        stage = name.partition(".")[0]
        yield Sample(stage=stage, work=work, seconds=seconds.get(digest), nbytes=size(digest))


def _peak(folder: Path) -> int:
    peak = 0
    for path in islice(folder.glob("[0-9]*.json"), MOST_REPORTS):
        try:
            peak = max(peak, json.loads(path.read_bytes())["memory"]["peak_rss_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return peak

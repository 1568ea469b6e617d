"""What a batch will take before it starts: disk, memory and time; refused if it cannot fit.

Past runs with the same model answer first, the plan of the model next, its configurations last.
Every row counts as if nothing of it were in the store, so amounts are the most that is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.batch.estimates import estimated_nbytes
from flows.batch.pace import spoken
from flows.batch.past import Past, read_past
from flows.batch.rows import Work
from flows.host_memory import host_memory_limit_bytes
from flows.machine import kept_rates
from flows.settings import RunSettings
from stages.errors import ModelError, RequestError
from stages.forecast_records import ModelForecast
from stages.shown_sizes import show_nbytes

STAGES = ("encode", "condition", "denoise", "decode")

BLOCK_BYTES = 4096
"""What a file takes at least."""

REPORT_BYTES = 24_000
"""Of a stage request in the home: its report, its lines in the journal and in the database."""

ROW_BYTES = 4_000
"""Of a row in the output folder beside its picture: its settings, its journal line, its result."""

KEPT_FREE = 0.02
"""Share of a disk that a batch leaves free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskForecast:
    """What a batch writes onto one disk.

    Attributes:
        folder: The first of the folders on it, or the nearest that exists.
        holds: What the folders hold, for people.
        need_bytes: At most.
        free_bytes: Now.
    """

    folder: str
    holds: str
    need_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the disk can take it."""
        return self.need_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """What the open rows of a batch will take.

    Attributes:
        disks: One for each disk that is written to.
        seconds: Of one row in the mean, by stage; empty where nothing is known.
        host_bytes: Of the largest stage process; 0 if nothing is known.
        device_bytes: Most device memory at a time; 0 without a GPU or a plan.
        problems: Why it cannot fit.
        notes: What the numbers rest on.
    """

    num_rows: int
    disks: tuple[DiskForecast, ...]
    seconds: Mapping[str, float]
    host_bytes: int
    device_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def elapsed_s(self) -> float | None:
        """All rows; None if nothing is known."""
        return self.num_rows * sum(self.seconds.values()) if self.seconds else None

    def check(self) -> None:
        """Refuse a batch that cannot fit.

        Raises:
            RequestError: With need and room of each.
        """
        if self.problems:
            raise RequestError(
                f"the batch of {self.num_rows} rows cannot fit: {'; '.join(self.problems)}; or "
                "run it all the same with --no-forecast"
            )

    def sentence(self) -> str:
        """The forecast in one line for people."""
        parts = [f"{show_nbytes(disk.need_bytes)} of {disk.holds}" for disk in self.disks]
        if self.host_bytes:
            parts.append(f"{show_nbytes(self.host_bytes)} of host memory")
        if self.device_bytes:
            parts.append(f"{show_nbytes(self.device_bytes)} of the device")
        time = spoken(self.elapsed_s)
        parts.append(f"about {time}" if time else "time not known before the first rows")
        return f"{self.num_rows} rows take at most {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"elapsed_s": self.elapsed_s}


def forecast_batch(
    jobs: Mapping[Work, int], job: Any, output: Path, settings: RunSettings
) -> BatchForecast:
    """Forecast the rows that are to run.

    Args:
        jobs: How many rows want which work.
        job: The checked job of one of them; tells model, dtype and device.
        output: The batch's folder.

    Loads no model and starts no process.
    """
    past = read_past(
        settings.home.reports,
        store_url=settings.store_url,
        family=job.family.name,
        model=job.model_name,
        dtype=job.dtype,
        device=job.device,
    )
    plan, note = _plan(jobs, job, settings)
    disks = _disks(jobs, job, past, output, settings)
    host = past.peak_host_bytes or _host_bytes(plan)
    seconds = _seconds(jobs, past, plan if job.device != "cpu" else None)
    return BatchForecast(
        num_rows=sum(jobs.values()),
        disks=disks,
        seconds=seconds,
        host_bytes=host,
        device_bytes=plan.device_bytes if plan is not None and job.device != "cpu" else 0,
        problems=tuple(_problems(disks, host, plan if job.device != "cpu" else None)),
        notes=tuple(text for text in (_basis(past, seconds, plan), note) if text),
    )


# ---- disk ----------------------------------------------------------------------------------


def _disks(
    jobs: Mapping[Work, int], job: Any, past: Past, output: Path, settings: RunSettings
) -> tuple[DiskForecast, ...]:
    stages = sorted({"encode", "denoise", "decode", *past.stages} - {"inspect"})
    artifacts = {
        stage: sum(n * _nbytes(stage, work, job, past) for work, n in jobs.items())
        for stage in stages
    }
    num_rows = sum(jobs.values())
    wanted = [
        (output, "files", artifacts["decode"] + num_rows * ROW_BYTES),
        (settings.home.root, "reports", num_rows * len(stages) * REPORT_BYTES),
    ]
    scheme, _, path = settings.store_url.partition("://")
    if scheme == "file":  # another store's room is not ours to know
        records = num_rows * len(stages) * BLOCK_BYTES
        wanted.insert(0, (Path(path), "artifacts", sum(artifacts.values()) + records))
    return _by_disk(wanted)


def _nbytes(stage: str, work: Work, job: Any, past: Past) -> int:
    known = past.nbytes(stage, work)
    if known is None:
        known = estimated_nbytes(stage, work, job.model, job.max_sequence_length)
    return -(-known // BLOCK_BYTES) * BLOCK_BYTES


def _by_disk(wanted: Iterable[tuple[Path, str, int]]) -> tuple[DiskForecast, ...]:
    found: dict[int, DiskForecast] = {}
    for folder, holds, need in wanted:
        place = _existing(folder)
        disk = place.stat().st_dev
        usage = shutil.disk_usage(place)
        free = max(0, usage.free - round(KEPT_FREE * usage.total))
        other = found.get(disk)
        all_of_it = need if other is None else other.need_bytes + need
        found[disk] = DiskForecast(
            folder=str(folder) if other is None else other.folder,
            holds=holds if other is None else f"{other.holds} and {holds}",
            need_bytes=all_of_it,
            free_bytes=free if usage.total else all_of_it,  # a network disk may not tell
        )
    return tuple(found.values())


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


# ---- memory and time -----------------------------------------------------------------------


def _plan(
    jobs: Mapping[Work, int], job: Any, settings: RunSettings
) -> tuple[ModelForecast | None, str]:
    """The plan of the largest of the rows, or why there is none."""
    from flows.job_forecast import forecast_job

    work = max(jobs, key=lambda each: (each.height * each.width * each.num_frames, each.is_guided))
    if job.offload.preset in ("group", "off"):
        return None, f"offload {job.offload.preset} plans nothing"
    try:
        plan = forecast_job(
            job,
            choice=job.offload,
            rates=kept_rates(settings.home),
            height=work.height,
            width=work.width,
            num_frames=work.num_frames,
            num_inference_steps=work.num_inference_steps,
            guidance_scale=2.0 if work.is_guided else 1.0,
        )
    except (ModelError, RequestError) as error:
        return None, f"no plan: {error}"
    return plan, ""


def _host_bytes(plan: ModelForecast | None) -> int:
    """Host memory of the weights that cannot stay in their files."""
    phases: dict[str, int] = {}
    for part in plan.components if plan is not None else ():
        phases[part.phase] = phases.get(part.phase, 0) + part.anonymous_bytes
    return max(phases.values(), default=0)


def _seconds(jobs: Mapping[Work, int], past: Past, plan: ModelForecast | None) -> dict[str, float]:
    """Seconds of a row in the mean, by stage; empty if any stage is not known."""
    num_rows = sum(jobs.values())
    found: dict[str, float] = {}
    for stage in STAGES:
        values = [(past.seconds(stage, work), n) for work, n in jobs.items()]
        known = [(seconds, n) for seconds, n in values if seconds is not None]
        if len(known) == len(values) and num_rows:
            found[stage] = sum(seconds * n for seconds, n in known) / num_rows
    if {"denoise", "decode"} <= found.keys():
        return found
    found = {}
    for part in plan.components if plan is not None else ():
        if part.elapsed_s is None or not part.mode:
            return {}
        found[part.phase] = found.get(part.phase, 0.0) + part.elapsed_s
    return found


def _problems(
    disks: Iterable[DiskForecast], host: int, plan: ModelForecast | None
) -> Iterable[str]:
    for disk in disks:
        if not disk.fits:
            yield (
                f"{disk.holds} need {show_nbytes(disk.need_bytes)} in {disk.folder}, where "
                f"{show_nbytes(disk.free_bytes)} can be used; free some space, or choose "
                "another disk"
            )
    if host > (limit := host_memory_limit_bytes()):
        yield (
            f"a stage needs {show_nbytes(host)} of host memory, this machine gives "
            f"{show_nbytes(limit)}; "
            "choose a dtype that is that of the model's files, or another machine"
        )
    for part in plan.components if plan is not None else ():
        if part.problem:
            yield f"{part.component} in phase {part.phase}: {part.problem}"


def _basis(past: Past, seconds: Mapping[str, float], plan: ModelForecast | None) -> str:
    if past.num_samples:
        return f"from {past.num_samples} results of earlier runs with this model"
    if seconds and plan is not None:
        return "from the model's plan: " + "; ".join(plan.notes)
    return "from the model's configurations; no earlier run is known"

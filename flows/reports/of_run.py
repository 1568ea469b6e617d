"""The report of one run, out of its journal and the reports of its stages."""

from __future__ import annotations

import mimetypes
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.reports.data import Failure, Found, Item, Report
from flows.reports.journal import NAME, read_journal
from flows.reports.measures import (
    bands_of,
    fallbacks_of,
    memory_lines,
    read_stage_reports,
    stage_totals,
)
from stages.errors import RequestError

LAST = "last"

Document = Mapping[str, Any]


def find_run(reports: Path, name: str) -> Path:
    """The folder of a run: by its id, the start of its id, or `last`.

    Args:
        reports: The folder that holds one folder for each run.

    Raises:
        RequestError: There is none, or more than one; the message names those there are.
    """
    folders = sorted(run_folders(reports), key=_written)
    if not folders:
        raise RequestError(f"no run has left a report in {reports}; paint something first")
    if name == LAST:
        return folders[-1]
    wanted = name.lower()
    exact = [each for each in folders if each.name == wanted]
    found = exact or [each for each in folders if wanted and each.name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(each.name for each in (found or folders)[-3:])
    if found:
        raise RequestError(f"{len(found)} runs begin with {name!r}: {listed}; give more of the id")
    raise RequestError(f"no run begins with {name!r} in {reports}; the newest runs are {listed}")


def run_folders(reports: Path) -> list[Path]:
    """The folders of all runs, in the order of their names."""
    try:
        return sorted(each for each in reports.iterdir() if each.is_dir())
    except FileNotFoundError:
        return []


def _written(folder: Path) -> tuple[float, str]:
    journal = folder / NAME
    path = journal if journal.exists() else folder
    return (path.stat().st_mtime, folder.name)


def run_report(folder: Path) -> Report:
    """The report of the run whose journal and stage reports lie in `folder`.

    Raises:
        RequestError: The folder holds neither.
    """
    lines = read_journal(folder)
    reports = read_stage_reports(folder)
    if not lines and not reports:
        raise RequestError(f"the run of {folder} has left no report; was it cut off at its start?")
    header: Document = next((line for line in reversed(lines) if line["event"] == "run"), {})
    requests = [line for line in lines if line["event"] == "request"]
    found = found_of(requests)
    items = items_of(lines, requests)
    failures = [
        Failure(
            what=line.get("label", ""),
            stage=line.get("stage", ""),
            kind=line.get("error", ""),
            reason=line.get("message", ""),
        )
        for line in lines
        if line["event"] == "failure"
    ]
    moments = [float(line["at"]) for line in lines if "at" in line]
    moments += [float(r["started_at"]) for r in reports if "started_at" in r]
    fallbacks = fallbacks_of(reports)
    warnings = Counter(str(each["message"]) for each in lines if each["event"] == "warning")
    warnings.update({text: 1 for r in reports for text in r.get("warnings", ())} - warnings.keys())
    return Report(
        title=_title(header, items),
        run_id=str(header.get("run_id") or folder.name),
        state=_state(lines, failures),
        begin=min(moments, default=None),
        end=max(moments, default=None),
        facts=facts_of(header, reports),
        items=items,
        failures=failures,
        warnings={text: n for text, n in warnings.items() if text not in fallbacks},
        fallbacks=fallbacks,
        totals=stage_totals(reports, found),
        lines=memory_lines(reports),
        bands=bands_of(reports),
        found=found,
        header=header,
        folder=_common_folder(items),
    )


def found_of(lines: Iterable[Document]) -> list[Found]:
    """The requests of a journal whose results were in the store."""
    return [
        Found(stage=each["stage"], label=each.get("label", ""), elapsed_s=float(each["elapsed_s"]))
        for each in lines
        if each["event"] == "request" and each.get("cached")
    ]


def saved_lines(lines: Iterable[Document]) -> dict[str, Document]:
    """Of each saved file, by its path, the line that says most, in the order of saving."""
    found: dict[str, Document] = {}
    for line in lines:
        if line["event"] == "item" or (line["event"] == "saved" and line["path"] not in found):
            found[line["path"]] = line
    return found


def items_of(lines: Iterable[Document], requests: Sequence[Document]) -> list[Item]:
    """The saved files of a run, in the order in which they were saved, each once."""
    made_by: dict[str, Document] = {
        digest: request for request in requests for digest in request["artifacts"].values()
    }
    return [_item(path, line, made_by) for path, line in saved_lines(lines).items()]


def _item(path: str, line: Document, made_by: Mapping[str, Document]) -> Item:
    settings = line.get("settings") or {}
    digests = [*settings.get("artifacts", {}).values(), line.get("digest")]
    requests = {
        request["request_digest"]: request
        for digest in digests
        if (request := made_by.get(str(digest))) is not None
    }
    ran = [float(r["elapsed_s"]) for r in requests.values() if not r["cached"]]
    return Item(
        name=Path(path).name,
        path=Path(path),
        media_type=line.get("media_type") or mimetypes.guess_type(path)[0] or "",
        is_cached=bool(requests) and not ran,
        elapsed_s=sum(ran) if requests else None,
        prompt=str(settings.get("prompt", "")),
        seed=settings.get("seed"),
        row_id=str(settings.get("row_id") or ""),
        settings=settings,
        parameters=str(line.get("parameters", "")),
    )


def facts_of(header: Document, reports: Sequence[Document]) -> dict[str, str]:
    """Name and text of what is true of the whole run."""
    devices = Counter(
        f"{r['device']} ({r['device_name']})" if r.get("device_name") else str(r.get("device", ""))
        for r in reports
    )
    versions: dict[str, str] = {}
    for report in reports:
        versions |= report.get("versions", {})
    versions = versions or header.get("libraries", {}) | {"exeunt": header.get("exeunt", "")}
    facts = {
        "model": header.get("model"),
        "family": header.get("family"),
        "task": header.get("task"),
        "device": ", ".join(devices) or header.get("device"),
        "dtype": header.get("dtype"),
        "offload": header.get("offload"),
        "host": header.get("host"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "store": header.get("store"),
        "run": header.get("run_id"),
    }
    return {name: str(text) for name, text in facts.items() if text}


def _title(header: Document, items: Sequence[Item]) -> str:
    family = str(header.get("family") or "run")
    prompts = list(dict.fromkeys(item.prompt for item in items if item.prompt))
    if not prompts:
        return family
    num_more = len(prompts) - 1
    more = f" and {num_more} more prompt{'s' if num_more > 1 else ''}" if num_more else ""
    return f"{family}: {prompts[0]}{more}"


def _state(lines: Sequence[Document], failures: Sequence[Failure]) -> str:
    if failures:
        return "failed"
    begun = {
        line["stage"]: line["num_requests"] for line in lines if line["event"] == "phase_begins"
    }
    done = Counter(line["stage"] for line in lines if line["event"] == "request")
    ended = {line["stage"] for line in lines if line["event"] == "phase_ends"}
    is_whole = begun and all(s in ended and done[s] >= n for s, n in begun.items())
    has_items = any(line["event"] in ("saved", "item") for line in lines)
    return "finished" if is_whole and (has_items or "decode" not in begun) else "unfinished"


def _common_folder(items: Sequence[Item]) -> Path | None:
    folders = {str(item.path.parent) for item in items if item.path is not None}
    return Path(os.path.commonpath(folders)) if folders else None

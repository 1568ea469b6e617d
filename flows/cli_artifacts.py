"""`exeunt artifacts`: what the store holds, whether it is whole, and what may go."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from datetime import timedelta

from flows.exit_codes import EXIT_OK, EXIT_STORE
from flows.settings import RunSettings
from stages.artifacts import ArtifactStore
from stages.shown_sizes import show_nbytes

DAY_S = timedelta(days=1).total_seconds()
DEFAULT_KEEP_DAYS = 30.0


def run(name: str, arguments: list[str]) -> int:
    """Run one of `ls`, `show`, `verify` and `gc`; returns the exit code."""
    options = _parser(name).parse_args(arguments)
    store = ArtifactStore(RunSettings.from_env().store_url)
    match options.action:
        case "ls":
            return _ls(store, options.json)
        case "show":
            print(json.dumps(store.show(options.digest), indent=1, ensure_ascii=False))
            return EXIT_OK
        case "verify":
            return _verify(store, options.json)
        case _:
            return _gc(store, options)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Artifacts are named by the sha256 of what they hold; the start of a digest "
        "is enough where it is unique. The store lies where EXEUNT_STORE says.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list artifacts, the newest last")
    show = actions.add_parser("show", help="say what an artifact holds")
    show.add_argument("digest", help="the digest, or enough of its start")
    verify = actions.add_parser("verify", help="read everything and set damaged artifacts aside")
    gc = actions.add_parser("gc", help="delete results that nobody used for a while")
    gc.add_argument(
        "--older-than-days",
        type=float,
        default=DEFAULT_KEEP_DAYS,
        metavar="DAYS",
        help=f"delete what was last used so long ago (default: {DEFAULT_KEEP_DAYS:g})",
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would go and keep it")
    for each in (ls, verify, gc):
        each.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ls(store: ArtifactStore, as_json: bool) -> int:
    objects = sorted(store.ls(), key=lambda each: each.modified_s)
    if as_json:
        print(json.dumps([asdict(each) for each in objects]))
        return EXIT_OK
    for each in objects:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.modified_s))
        what = f"{'+'.join(each.stages) or '-':<8}  {each.media_type or 'unknown'}"
        print(f"{each.digest[:16]}  {show_nbytes(each.size):>10}  {when}  {what}")
    total = show_nbytes(sum(each.size for each in objects))
    print(f"{len(objects)} artifacts, {total} in {store.url}")
    if checkpoints := store.all_checkpoints():
        num_requests = len({each.request_digest for each in checkpoints})
        size = show_nbytes(sum(each.size for each in checkpoints))
        print(f"besides, {size} in checkpoints of {num_requests} unfinished denoises")
    return EXIT_OK


def _verify(store: ArtifactStore, as_json: bool) -> int:
    report = store.verify_all()
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        for digest in report.damaged:
            print(f"damaged, set aside: {digest}")
        for key, digests in report.missing.items():
            print(f"missing: {', '.join(digest[:16] for digest in digests)} of {key}")
        for key in report.unreadable_records:
            print(f"record that cannot be used: {key}")
        verdict = "all intact" if report.is_intact else "what is gone is recomputed when needed"
        print(f"{report.num_objects} artifacts read: {verdict}")
    return EXIT_OK if report.is_intact else EXIT_STORE


def _gc(store: ArtifactStore, options: argparse.Namespace) -> int:
    report = store.gc(older_than_s=options.older_than_days * DAY_S, dry_run=options.dry_run)
    if options.json:
        print(json.dumps(asdict(report)))
        return EXIT_OK
    verb = "would remove" if report.is_dry_run else "removed"
    print(
        f"{verb} {len(report.records)} records, {len(report.objects)} artifacts, "
        f"{len(report.checkpoints)} checkpoints and {len(report.leftovers)} leftovers: "
        f"{show_nbytes(report.freed_bytes)}"
    )
    return EXIT_OK

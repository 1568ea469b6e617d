"""`exeunt blocks`: review the code of custom blocks, and say what was reviewed."""

from __future__ import annotations

import argparse
import difflib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.exit_codes import EXIT_OK
from flows.settings import RunSettings
from stages.block_locks import Review, check_block_sources, forget, last_review, reviews, write_lock
from stages.block_outline import is_standard, outline_entry, outline_file
from stages.block_sources import BlockSources, read_block_sources
from stages.errors import RequestError
from stages.rules import escape_for_terminal


def run(name: str, arguments: list[str]) -> int:
    """Run one of `review`, `ls` and `forget`; returns the exit code.

    Raises:
        StageError: The folder is at fault, or a lock cannot be read or written.
    """
    options = _parser(name).parse_args(arguments)
    home = RunSettings.from_env().home.root
    match options.action:
        case "review":
            return _review(home, Path(options.directory), options)
        case "ls":
            return _ls(home, options.json)
        case _:
            (review,) = _of_digest(home, options.digest)
            forget(home, review.digest)
            print(f"blocks {review.digest[:16]} of {review.directory} do not run any more")
            return EXIT_OK


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"exeunt {name}",
        description="Custom blocks run only from code that was reviewed here, byte for byte. "
        "Reviewed code is kept in the exeunt home and runs with all rights of its user: there is "
        "no sandbox around it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    review = actions.add_parser(
        "review", help="show what a folder of blocks would run, and lock it to that"
    )
    review.add_argument("directory", metavar="DIR", help="a folder with a modular_config.json")
    review.add_argument("--dry-run", action="store_true", help="show it and write no lock")
    ls = actions.add_parser("ls", help="list what was reviewed, the newest last")
    for each in (review, ls):
        each.add_argument("--json", action="store_true", help="print JSON")
    away = actions.add_parser("forget", help="remove a lock, so that its blocks run no more")
    away.add_argument("digest", help="the digest, or enough of its start")
    return parser


def _review(home: Path, directory: Path, options: argparse.Namespace) -> int:
    sources = read_block_sources(directory)
    check_block_sources(sources)
    last = last_review(home, directory)
    document = _document(directory, sources)
    if last is not None and last.digest != sources.digest:
        document["differences"] = sources.differences(last.sources)
    if not options.dry_run:
        document["lock"] = str(write_lock(home, directory, sources))
    if options.json:
        print(json.dumps(document))
        return EXIT_OK
    _show(document)
    if last is not None and last.digest != sources.digest:
        for line in _changes(last, sources):
            print(escape_for_terminal(line))
    if "lock" in document:
        print(f"locked: exactly these bytes may run; the lock is {document['lock']}")
        print("read them before you use --blocks; `exeunt blocks forget` takes the lock back")
    return EXIT_OK


def _document(directory: Path, sources: BlockSources) -> dict[str, Any]:
    entry, modules = outline_entry(sources), set(sources.modules.values())
    files = []
    for path, sha256 in sources.sha256_by_file.items():
        outline = outline_file(sources, path) if path in modules else None
        files.append(
            {
                "path": path,
                "nbytes": len(sources.files[path].encode("utf-8")),
                "sha256": sha256,
                "imports": list(outline.imports) if outline else [],
                "calls": list(outline.calls) if outline else [],
            }
        )
    return {
        "directory": str(directory.resolve()),
        "digest": sources.digest,
        "entry": sources.entry,
        "bases": list(entry.bases),
        "inputs": list(entry.inputs),
        "outputs": list(entry.outputs),
        "components": list(entry.components),
        "files": files,
    }


def _show(document: dict[str, Any]) -> None:
    print(f"blocks {document['digest'][:16]} in {escape_for_terminal(document['directory'])}")
    print(f"  class       {document['entry']}({', '.join(document['bases'])})")
    for name in ("inputs", "outputs", "components"):
        texts = ", ".join(document[name]) or "those of its bases"
        print(f"  {name:<11} {escape_for_terminal(texts)}")
    for file in document["files"]:
        print(f"  {escape_for_terminal(file['path'])}")
        print(f"    {file['nbytes']} bytes, sha256 {file['sha256']}")
        if file["imports"]:
            marked = (
                each if not is_standard(each) else f"{each} (Python)" for each in file["imports"]
            )
            print(f"    imports {', '.join(marked)}")
        for call in file["calls"]:
            print(f"    look at {call}(...)")


def _changes(last: Review, sources: BlockSources) -> Iterator[str]:
    """The differences from what was reviewed before, line by line."""
    yield f"since {_when(last.reviewed_at)}:"
    for name in sorted({*last.sources.files, *sources.files}):
        before = last.sources.files.get(name, "").splitlines()
        after = sources.files.get(name, "").splitlines()
        yield from difflib.unified_diff(before, after, name, name, lineterm="")


def _ls(home: Path, as_json: bool) -> int:
    found = reviews(home)
    if as_json:
        documents = [
            {
                "digest": review.digest,
                "directory": review.directory,
                "entry": review.sources.entry,
                "reviewed_at": review.reviewed_at,
                "files": review.sources.sha256_by_file,
            }
            for review in found
        ]
        print(json.dumps(documents))
        return EXIT_OK
    for review in found:
        where = escape_for_terminal(review.directory)
        print(f"{review.digest[:16]}  {_when(review.reviewed_at)}  {review.sources.entry}  {where}")
    return EXIT_OK


def _of_digest(home: Path, start: str) -> list[Review]:
    found = [review for review in reviews(home) if start and review.digest.startswith(start)]
    if len(found) != 1:
        raise RequestError(
            f"{len(found)} reviewed blocks begin with {start!r}, expected one; `exeunt blocks ls` "
            "lists them"
        )
    return found


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

"""All rows of a table, checked before any of them runs.

The table is read twice, once to check every row and once to run, so that of a large table only
ids, names and what the journal says are in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from flows.batch.errors import TableError
from flows.batch.families import BatchFamily
from flows.batch.journal import Journal
from flows.batch.names import BatchNames
from flows.batch.results import RowResult
from flows.batch.rows import PreparedRow, Work
from flows.batch.scope import remembering
from flows.row_names import DEFAULT_TEMPLATE, NameTemplate, file_name
from flows.settings import RunSettings
from flows.table import Table, TableRow
from flows.table_columns import BATCH_WIDE, NAME, row_id
from stages import rules
from stages.contracts import json_digest
from stages.errors import RequestError
from stages.models import ModelDirectory
from stages.text_rules import shown
from stages.versions import CODE_VERSIONS, defining_versions

NO_PART_OF_A_PICTURE = frozenset(
    {"model", "device", "offload", "device_budget", "host_budget"}
    | {"output", "on_truncate", "fresh", "prompt", "seed"}
)
"""Arguments that stand in a row's digest in another way, or do not change its picture."""

TEXTS = frozenset({"prompt", "negative_prompt", "seed"})
"""Arguments that never name a file."""


@dataclass(kw_only=True)
class Prepared:
    """A table whose rows were checked.

    Attributes:
        count: Rows of the table, bad ones included.
        bad: Results of the rows that cannot run.
        num_done: Rows with nothing left to do.
        job: The checked job of one good row; None if there is none.
        jobs: How many rows want which work, to forecast it; see `Work`.
    """

    _reader: _Reader
    _journal: Journal
    count: int = 0
    bad: list[RowResult] = field(default_factory=list)
    num_done: int = 0
    job: Any = None
    jobs: dict[Work, int] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    @property
    def model(self) -> ModelDirectory | None:
        """The opened model; None if no row is good."""
        return None if self.job is None else self.job.model

    @property
    def num_open(self) -> int:
        """Rows that are to run."""
        return self.count - len(self.bad) - self.num_done

    def rows(self) -> Iterator[PreparedRow]:
        """The rows that are to run, in the order of the table.

        Raises:
            RequestError: The table has changed since it was checked.
        """
        for row in self._reader.table.rows():
            if (name := self._names.get(row.number)) is None:
                continue
            prepared = self._reader.prepared(row, name)
            if not self._journal.done(prepared):
                yield prepared

    def chunks(self, size: int) -> Iterator[list[PreparedRow]]:
        """The rows that are to run, `size` at a time."""
        left = self.rows()
        while chunk := list(islice(left, size)):
            yield chunk


def read(
    table: str | Path,
    family: BatchFamily,
    defaults: Mapping[str, Any],
    *,
    journal: Journal,
    template: str = DEFAULT_TEMPLATE,
    overwrite: bool = False,
    tell: Callable[[int], None] | None = None,
) -> Prepared:
    """Check every row of a table.

    Args:
        table: A file or a folder; see `flows.table`.
        family: Whose flow the rows run.
        defaults: Arguments of the family for rows that leave them empty, and those that are one
            for all rows.
        journal: Of the output folder.
        template: Makes the file names of rows that have none.
        overwrite: Whether files that are there and not of this batch may be replaced.
        tell: Called now and then with the number of rows that were read.

    Raises:
        RequestError: The table as a whole cannot be used: unknown columns, an id that stands
            twice, names that some disk takes for one, files in the way, or an argument for all
            rows that is wrong.
        StageError: The model or the store is at fault.
    """
    fields = family.columns.arguments | {"id", "row", "seed"}
    reader = _Reader(Table(table), family, dict(defaults), NameTemplate(template, fields), journal)
    prepared = Prepared(_reader=reader, _journal=journal)
    with remembering():
        _check_rows(prepared, reader, BatchNames(journal.output, overwrite), tell)
    return prepared


def _check_rows(
    prepared: Prepared, reader: _Reader, names: BatchNames, tell: Callable[[int], None] | None
) -> None:
    seen: dict[str, int] = {}
    for row in reader.table.rows():
        prepared.count = row.number
        if tell is not None and row.number % 100 == 0:
            tell(row.number)
        reader.family.columns.check_names(row)
        identity = f"{row.number:06d}"
        try:
            identity = row_id(row)
            _require_once(seen, identity, row)
            name, job = reader.check(row)
        except TableError:
            raise
        except RequestError as error:
            prepared.bad.append(_invalid(row, identity, error))
            continue
        good = reader.prepared(row, name)
        is_done = prepared._journal.done(good)
        names.add(good, is_own=is_done or prepared._journal.is_own(good))
        prepared._names[row.number] = name
        prepared.job = job
        if is_done:
            prepared.num_done += 1
        else:
            work = _work(job)
            prepared.jobs[work] = prepared.jobs.get(work, 0) + 1
    names.check()


class _Reader:
    """Makes rows of a table into arguments of the family's flow."""

    def __init__(
        self,
        table: Table,
        family: BatchFamily,
        defaults: dict[str, Any],
        template: NameTemplate,
        journal: Journal,
    ) -> None:
        self.table, self.family, self.journal = table, family, journal
        self._defaults = {**family.defaults, **defaults, "output": str(journal.output)}
        for name in family.one_row:
            self._defaults.pop(name, None)
        self._template = template
        self._home = RunSettings.from_env().home.root
        self._model: ModelDirectory | None = None

    def check(self, row: TableRow) -> tuple[str, Any]:
        """A row's file name and checked job.

        Raises:
            RequestError: The row cannot be used.
            TableError: What is wrong is an argument that is one for all rows.
        """
        arguments, seed = self._arguments(row)
        try:
            job = self.family.check(arguments)
        except RequestError as error:
            self._blame(arguments, error)
            raise
        if self._model is None:
            self._model = job.model
        own_name = row.cells.get(NAME)
        if own_name is None:
            used = {
                name: value
                for name in self.family.columns.arguments
                if arguments.get(name) is None and (value := getattr(job, name, None)) is not None
            }
            values = {**arguments, **used, "id": row_id(row), "row": row.number, "seed": seed}
            own_name = self._template.fill(values)
        return file_name(own_name, job.save_as.extension), job

    def _blame(self, arguments: dict[str, Any], error: RequestError) -> None:
        """Raise if the row is right and an argument that is one for all rows is wrong."""
        kept = {"model", "output"}
        plain = {
            name: self.family.defaults.get(name) if name in BATCH_WIDE - kept else value
            for name, value in arguments.items()
        }
        if plain == arguments:
            return
        try:
            self.family.check(plain)
        except RequestError:
            return
        raise TableError(str(error)) from error

    def prepared(self, row: TableRow, name: str) -> PreparedRow:
        """A row that was checked, ready to run under `name`."""
        arguments, seed = self._arguments(row)
        own = {
            name: value
            for name, value in arguments.items()
            if name not in BATCH_WIDE and value != self.family.defaults.get(name)
        }
        return PreparedRow(
            number=row.number,
            id=row_id(row),
            arguments=arguments,
            own=own,
            file_name=name,
            seed=seed,
            digest=self._digest(arguments, seed),
        )

    def _arguments(self, row: TableRow) -> tuple[dict[str, Any], int]:
        arguments = self.family.columns.read(row, self._defaults)
        seed = rules.check_seed(arguments["seed"])
        if seed == -1:
            seed = made_seed(self.journal.key, row_id(row))
        arguments["seed"] = seed
        return arguments, seed

    def _digest(self, arguments: Mapping[str, Any], seed: int) -> str:
        counted = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in NO_PART_OF_A_PICTURE
        }
        document = {
            "arguments": counted,
            "prompt": arguments["prompt"],
            "seed": str(seed),
            "files": _files(arguments),
            "model": self._model_digest,
        }
        return hashlib.sha256(
            json.dumps(document, sort_keys=True, default=str).encode()
        ).hexdigest()

    @cached_property
    def _model_digest(self) -> str:
        assert self._model is not None, "a row is checked before its digest is made"
        parts = self._model.components
        return json_digest(
            {
                "family": self.family.name,
                "index": self._model.index_digest,
                "configs": {name: part.config_digest for name, part in parts.items()},
                "weights": {name: part.fingerprint(self._home) for name, part in parts.items()},
                "code": dict(CODE_VERSIONS),
                "libraries": dict(defining_versions()),
            }
        )


def made_seed(key: str, identity: str) -> int:
    """The seed of a row that gives none: the same at every start of a batch, 0 to 2**53 - 1."""
    digest = hashlib.sha256(f"{key}/{identity}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - rules.DRAWN_SEED_BITS)


def _require_once(seen: dict[str, int], identity: str, row: TableRow) -> None:
    if (other := seen.setdefault(identity, row.number)) != row.number:
        raise TableError(
            f"id {shown(identity)} stands in row {other} and in row {row.number} ({row.place}); "
            "ids tell the rows apart, so make them differ or leave the column out"
        )


def _invalid(row: TableRow, identity: str, error: RequestError) -> RowResult:
    cells = {name: value for name, value in row.cells.items() if value is not None}
    prompt, negative = cells.get("prompt"), cells.get("negative_prompt")
    return RowResult(
        id=identity,
        row=row.number,
        status="invalid",
        error_type=type(error).__name__,
        error=f"{row.place}: {error}",
        prompt=prompt if isinstance(prompt, str) else None,
        negative_prompt=negative if isinstance(negative, str) else None,
        arguments=json.dumps(cells, default=str),
    )


def _files(arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Size and time of each file that an argument names."""
    found = {}
    for name, value in arguments.items():
        if name in TEXTS or name in BATCH_WIDE:
            continue
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and 0 < len(text) < 4096 and "\0" not in text:
                try:
                    status = os.stat(os.path.expanduser(text))  # noqa: PTH111, PTH116
                except OSError:
                    continue
                found[text] = [status.st_size, status.st_mtime_ns]
    return found


def _work(job: Any) -> Work:
    return Work(
        height=job.height,
        width=job.width,
        num_frames=getattr(job, "num_frames", 1),
        num_inference_steps=job.num_inference_steps,
        is_guided=job.is_guided,
    )

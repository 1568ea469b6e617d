"""What a batch asks of a family: its flow function, its checks, its columns, its files."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flows.cli_family import UNCHECKED
from flows.table_columns import BATCH_WIDE, ONE_PICTURE, Columns
from stages.errors import RequestError
from stages.text_rules import shown


@dataclass(frozen=True)
class BatchFamily:
    """A family whose flow runs the rows of a table.

    Attributes:
        name: The command's name, such as `z-image`.
        function: The flow's function.
        check_arguments: Checks its arguments and returns the job; loads no model.
    """

    name: str
    function: Callable[..., Any]
    check_arguments: Callable[..., Any]

    @cached_property
    def columns(self) -> Columns:
        """The columns that its tables may have."""
        return Columns(self.function, self.name)

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Its arguments that have a default."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }

    @cached_property
    def shared(self) -> frozenset[str]:
        """Its arguments that may be given for all rows."""
        return (self.columns.arguments | BATCH_WIDE) & self._names - {"output"}

    @cached_property
    def required(self) -> frozenset[str]:
        """Its arguments without a default."""
        return self._names - self.defaults.keys()

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.function).parameters)

    @property
    def one_row(self) -> frozenset[str]:
        """Arguments that would make several files of one row."""
        return ONE_PICTURE & self.defaults.keys()

    def check(self, arguments: Mapping[str, Any]) -> Any:
        """The checked job of a row.

        Raises:
            RequestError: An argument cannot be used, or one is missing.
        """
        for name in sorted(self.required):
            if arguments.get(name) is None:
                raise RequestError(
                    f"{name} is empty, and {self.name} needs one; fill the cell or give "
                    f"--{name.replace('_', '-')} for all rows"
                )
        return self.check_arguments(
            **{name: value for name, value in arguments.items() if name not in UNCHECKED}
        )


def batch_family(name: str) -> BatchFamily:
    """The family of a command's name.

    Raises:
        RequestError: There is none; with those that there are.
    """
    from flows.cli import FAMILIES

    if name not in FAMILIES:
        raise RequestError(
            f"family is {shown(name)}, known are {', '.join(sorted(FAMILIES))}; name one of them"
        )
    module = importlib.import_module(FAMILIES[name][0])
    flow = getattr(module, module.__name__.rpartition(".")[2])
    return BatchFamily(name, flow.fn, module.check)

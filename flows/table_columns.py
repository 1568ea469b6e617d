"""What a table's cells mean: the arguments of a family's flow, exact, with the batch's defaults."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, Union, get_args, get_origin

from flows.table import TableRow
from flows.table_formats import shown as shown_column
from stages.errors import RequestError
from stages.text_rules import kind, shown

ID, NAME = "id", "name"

BATCH_WIDE = frozenset(
    {
        *("model", "dtype", "device", "offload", "device_budget", "host_budget", "component"),
        *("blocks", "block_input", "output", "embed_settings", "on_truncate", "vae_tiling"),
        *("format", "quality", "label", "fresh"),
    }
)
"""Arguments that are one for all rows: a stage process serves one model on one device, and no
table can name code."""

ONE_PICTURE = frozenset({"num_images", "num_videos"})
"""Arguments that would make several pictures of a row."""

_BOOLS = {"true": True, "false": False}


class Columns:
    """The columns that a family's tables may have.

    Args:
        function: The family's flow function; its signature says names and types.
        family: For messages.
    """

    def __init__(self, function: Callable[..., Any], family: str) -> None:
        self._family = family
        self._hints = {
            name: hint
            for name, hint in typing.get_type_hints(function).items()
            if name in inspect.signature(function).parameters
        }
        self.arguments = frozenset(self._hints) - BATCH_WIDE - ONE_PICTURE

    def check_names(self, row: TableRow) -> None:
        """Refuse columns that nothing is made of.

        Raises:
            RequestError: With each of them, and what may have been meant.
        """
        known = {ID, NAME, *self.arguments}
        unknown = [name for name in row.cells if name not in known]
        if not unknown:
            return
        told = [shown_column(name) + self._why(name) for name in unknown[:10]]
        raise RequestError(
            f"{row.place} has the unknown column{'s' if len(told) > 1 else ''} "
            f"{', '.join(told)}; {self._family} takes {', '.join(sorted(known))}"
        )

    def _why(self, name: str) -> str:
        if name in self._hints:
            one = "one row is one picture" if name in ONE_PICTURE else "one for the whole batch"
            return f" ({one})"
        near = difflib.get_close_matches(name.strip().lower(), {ID, NAME, *self.arguments}, n=1)
        return f" (did you mean {near[0]}?)" if near else ""

    def read(self, row: TableRow, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """A row's arguments: its own cells, and `defaults` where they are empty.

        Raises:
            RequestError: A cell is not of its argument's type.
        """
        if row.problem:
            raise RequestError(row.problem)
        own = {
            name: convert(name, self._hints[name], value)
            for name, value in row.cells.items()
            if value is not None and name in self.arguments
        }
        found = {**defaults, **own}
        if not isinstance(found.get("prompt"), str):
            value = found.get("prompt")
            what = "empty" if value is None else f"{shown(value)} ({kind(value)}), expected text"
            raise RequestError(f"prompt is {what}; fill the cell or give --prompt for all rows")
        return found


def row_id(row: TableRow) -> str:
    """The row's id: its own, or its number in six digits.

    Raises:
        RequestError: It is neither text nor a whole number, or empty, or too long.
    """
    value = row.cells.get(ID)
    if value is None:
        return f"{row.number:06d}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"id is {shown(value)} ({kind(value)}), expected text or a whole number")
    text = str(value)
    if not 0 < len(text) <= 200:
        raise RequestError(f"id has {len(text)} characters, allowed are 1 to 200")
    return text


def convert(name: str, hint: Any, value: Any) -> Any:
    """A cell as its argument's type; what cannot be told apart is left to the flow's checks.

    Raises:
        RequestError: The cell holds no such value.
    """
    kinds = _kinds(hint)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    if choices:
        if value not in choices:
            raise RequestError(f"{name} is {shown(value)}, allowed are {', '.join(choices)}")
        return value
    if isinstance(value, Decimal) and value == value.to_integral_value():
        value = int(value)
    if bool in kinds:
        return _bool(name, value)
    if any(get_origin(each) is list or each is list for each in kinds) and name != "prompt":
        return _list(name, value, may_be_text=str in kinds)
    if int in kinds and str in kinds:  # a seed: its digits may come as text
        return value
    if float in kinds:
        return _float(name, value)
    return _int(name, value) if int in kinds else value


def _bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()]
    raise RequestError(f"{name} is {shown(value)} ({kind(value)}), expected true or false")


def _list(name: str, value: Any, *, may_be_text: bool) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"{name} is {shown(value)}, which is no JSON array") from error
    if isinstance(value, str):
        return value if may_be_text else [value]
    if not isinstance(value, list):
        raise RequestError(f"{name} is {shown(value)} ({kind(value)}), expected a list")
    return value


def _float(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"{name} is {shown(value)} ({kind(value)}), expected a number"
        ) from error
    if not math.isfinite(number):
        raise RequestError(f"{name} is {number}, expected a finite number")
    return number


def _int(name: str, value: Any) -> Any:
    if isinstance(value, str):
        text = value.strip()
        if not (text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= 40):
            raise RequestError(f"{name} is the text {shown(value)}, expected a whole number")
        return int(text)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value  # the flow's own check names what else it may be


def _kinds(hint: Any) -> list[Any]:
    if get_origin(hint) is typing.Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        return [each for part in get_args(hint) for each in _kinds(part)]
    return [] if hint is type(None) else [hint]

"""A flow's arguments as command-line options: the flow's signature is the one source."""

from __future__ import annotations

import argparse
import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, Union, get_args, get_origin


def add_flow_arguments(
    parser: argparse._ActionsContainer,
    function: Callable[..., Any],
    *,
    names: Collection[str] | None = None,
) -> None:
    """Add an option for each parameter of a flow's function.

    Names, defaults and help texts are the function's own; an argument without a default is
    required, a list may be given several times, a bool is a switch with a `--no-` twin.

    Args:
        names: Those alone; none of them is required, and one that is not given is absent.
    """
    hints = typing.get_type_hints(function)
    texts = argument_texts(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if names is not None and name not in names:
            continue
        option = "--" + name.replace("_", "-")
        required = parameter.default is inspect.Parameter.empty and names is None
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        text = texts.get(name, "").replace("%", "%%")
        if default not in (None, "") and not isinstance(default, bool):
            text = f"{text} (default: {default})"
        default = default if names is None else argparse.SUPPRESS
        kinds = _kinds(hints[name])
        if bool in kinds:
            parser.add_argument(
                option, action=argparse.BooleanOptionalAction, default=default, help=text
            )
            continue
        options: dict[str, Any] = {"help": text, "default": default, "dest": name}
        if choices := [choice for kind in kinds for choice in _choices(kind)]:
            options["choices"] = choices
        else:
            options["type"] = _converter(kinds)
            options["metavar"] = _metavar(kinds)
        if any(get_origin(kind) is list for kind in kinds):
            options |= {"action": "append", "metavar": "TEXT"}
        parser.add_argument(option, required=required, **options)


def argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """The texts under `Args:` in a function's docstring, by argument."""
    texts: dict[str, str] = {}
    current, inside = "", False
    for line in (inspect.getdoc(function) or "").splitlines():
        if line.startswith("Args:"):
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside and line.startswith("    ") and not line.startswith("     "):
            current, _, text = line.strip().partition(":")
            texts[current] = text.strip()
        elif inside and line.strip() and current:
            texts[current] += " " + line.strip()
    return texts


def _kinds(hint: Any) -> list[Any]:
    if get_origin(hint) is typing.Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    return [] if hint is type(None) else [hint]


def _choices(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _converter(kinds: list[Any]) -> Callable[[str], Any]:
    if int in kinds and str not in kinds:
        return int
    if float in kinds:
        return float
    return str


def _metavar(kinds: list[Any]) -> str:
    if kinds[0] is int:  # the first kind is what people type
        return "N"
    return "X" if float in kinds else "TEXT"

"""File names of a batch's rows: made of a template, safe, and inside the output folder."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from stages.errors import RequestError
from stages.file_names import MAX_STEM_NBYTES, check_name, safe_stem
from stages.saving import PICTURE_ENDINGS
from stages.text_rules import shown

DEFAULT_TEMPLATE = "{id}"
MAX_TEMPLATE_CHARACTERS = 200

_FORMATTER = string.Formatter()


class NameTemplate:
    """Makes a file name of a row's values.

    Args:
        text: With fields such as `{id}`, `{row:05d}`, `{seed}` or `{prompt}`.
        fields: The names that may stand in it.

    Raises:
        RequestError: The template is malformed, or names what no row has.
    """

    def __init__(self, text: str, fields: frozenset[str]) -> None:
        if not 0 < len(text) <= MAX_TEMPLATE_CHARACTERS:
            raise RequestError(
                f"name_template has {len(text)} characters, allowed are 1 to "
                f"{MAX_TEMPLATE_CHARACTERS}"
            )
        try:
            self._parts = list(_FORMATTER.parse(text))
        except ValueError as error:
            raise RequestError(
                f"name_template {shown(text)} is malformed: {error}; write {{{{ for a brace"
            ) from error
        self.text = text
        for _, field, spec, conversion in self._parts:
            if field is None:
                continue
            if field not in fields or conversion or "{" in (spec or ""):
                raise RequestError(
                    f"name_template {shown(text)} has the field {shown(field)}; "
                    f"use {', '.join(sorted(fields))}, with a format at most, such as {{row:05d}}"
                )

    def fill(self, values: Mapping[str, Any]) -> str:
        """The name of one row, not yet checked.

        Raises:
            RequestError: A field is empty in this row, or its format does not fit its value.
        """
        made = []
        for literal, field, spec, _ in self._parts:
            made.append(literal)
            if field is not None:
                made.append(self._filled(field, spec or "", values.get(field)))
        return "".join(made)

    def _filled(self, field: str, spec: str, value: Any) -> str:
        if value is None:
            raise RequestError(f"name_template {shown(self.text)}: {field} is empty in this row")
        try:
            text = format(value, spec)
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"name_template {shown(self.text)}: {field} is {shown(value)}, which the format "
                f"{spec!r} does not fit: {error}"
            ) from error
        return keep_plain(text)


def keep_plain(text: str) -> str:
    """`text` as a piece of a file name: itself if it is plain, else its letters and digits."""
    is_plain = all(c.isascii() and (c.isalnum() or c in "-_") for c in text)
    if is_plain and text[:1].isalnum() and len(text) <= MAX_STEM_NBYTES:
        return text
    return safe_stem(text)


def file_name(name: str, extension: str) -> str:
    """A checked name below the output folder, with its extension in place of another format's.

    Raises:
        RequestError: It could leave the folder or is no file name; see `check_name`.
    """
    if isinstance(name, str) and extension in PICTURE_ENDINGS:
        stem, _, ending = name.rpartition(".")
        if stem and f".{ending}".casefold() in set(PICTURE_ENDINGS) - {extension}:
            name = stem
    return str(check_name(name, extension))

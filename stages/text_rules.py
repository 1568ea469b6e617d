"""Rules for text, and text made safe to show; loads no torch."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence

from stages.errors import RequestError

MAX_PROMPT_CHARACTERS = 100_000

MAX_PROMPTS_BYTES = 400_000
"""All prompts of one run as JSON. Prefect's server takes 524,288 bytes of parameters a run."""


def check_prompt(text: object, name: str = "prompt") -> str:
    """A prompt, unchanged: no trimming, no normal form, no meaning for words such as `nan`.

    An empty text is valid. Positions in messages count characters from 0.

    Raises:
        RequestError: It is null or no text, holds a NUL or a lone surrogate, or is longer
            than 100,000 characters.
    """
    if text is None:
        raise RequestError(f"{name} is null; write an empty text for none")
    if not isinstance(text, str):
        raise RequestError(f"{name} is {shown(text)} ({kind(text)}), expected text")
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            f"{name} has {len(text)} characters, {MAX_PROMPT_CHARACTERS} are allowed; shorten it"
        )
    if (position := text.find("\0")) >= 0:
        raise RequestError(f"{name} has a NUL at position {position}; remove it")
    if surrogate := re.search("[\ud800-\udfff]", text):
        raise RequestError(
            f"{name} has a lone surrogate U+{ord(surrogate[0]):04X} at position "
            f"{surrogate.start()}, which is no character; repair the text"
        )
    return text


def check_prompts(prompts: Sequence[object], negative_prompt: object = "") -> list[str]:
    """The prompts of one run, each as `check_prompt` has it.

    Args:
        prompts: The prompts, unchecked.
        negative_prompt: Counts as one more.

    Raises:
        RequestError: There is none, one of them is no prompt, or together they take more than
            400,000 bytes as JSON with escapes.
    """
    checked = [check_prompt(text) for text in prompts]
    if not checked:
        raise RequestError("prompt is an empty list; give at least one, which may be an empty text")
    nbytes = len(json.dumps([*checked, check_prompt(negative_prompt, "negative_prompt")]))
    if nbytes > MAX_PROMPTS_BYTES:
        raise RequestError(
            f"the prompts of this run take {nbytes} bytes as JSON, {MAX_PROMPTS_BYTES} are "
            "allowed; shorten them, or spread them over several runs"
        )
    return checked


def escape_for_terminal(text: str, limit: int | None = None) -> str:
    r"""A text that cannot steer a terminal, and whose invisible marks can be seen.

    Control characters, line ends, marks of writing direction and other format characters
    become `\n`, `\x1b`, `\u202e`. The joiners U+200C and U+200D stay, since letters and
    pictographs need them.

    Args:
        limit: Longest text to return unshortened, in characters of `text`.
    """
    rest = ""
    if limit is not None and len(text) > limit:
        text, rest = text[:limit], f"… (+{len(text) - limit} characters)"
    return "".join(map(_escaped, text)) + rest


def _escaped(character: str) -> str:
    if character in "\u200c\u200d" or unicodedata.category(character) not in (
        "Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp",
    ):  # fmt: skip
        return character
    if character in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[character]
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def shown(value: object) -> str:
    """A value as an error message shows it: short, without control characters."""
    return escape_for_terminal(repr(value), limit=60)


def kind(value: object) -> str:
    """A value's type as an error message names it."""
    return "null" if value is None else type(value).__name__

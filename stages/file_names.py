"""Names for files that people find again: safe on every disk, and inside their folder."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import PurePosixPath

from stages.errors import RequestError
from stages.text_rules import escape_for_terminal, shown

MAX_STEM_NBYTES = 80
MAX_NAME_NBYTES = 255
COUNTER_NBYTES = len("-9999")
"""Room for what tells files of one name apart."""

_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_PLAIN = "picture"


def safe_stem(prompt: str, seed: int | None = None) -> str:
    """A file name without extension, made of a prompt's letters and digits and the seed.

    At most 80 bytes of UTF-8 in NFC, in lower case; no separator, dot, space, control or format
    character; never empty, hidden, an option or a device name of other systems.
    """
    tail = "" if seed is None else f"-{seed}"
    words = unicodedata.normalize("NFC", unicodedata.normalize("NFC", prompt).lower())
    slug = "".join(c if unicodedata.category(c)[0] in "LMN" else "-" for c in words)
    slug = re.sub("-+", "-", slug).strip("-")
    room = MAX_STEM_NBYTES - len(tail)
    slug = slug.encode("utf-8")[:room].decode("utf-8", "ignore").rstrip("-")
    # A mark without its letter would attach itself to whatever stands before the name.
    slug = slug.lstrip("".join(c for c in slug if unicodedata.category(c)[0] == "M"))
    if not slug or _RESERVED.fullmatch(slug + tail):
        slug = f"{_PLAIN}-{slug}".strip("-")
    return slug + tail


def check_name(name: object, extension: str = ".png") -> PurePosixPath:
    """A relative path below the output folder, in NFC, with its extension.

    Args:
        name: What the user asked for; `/` separates subfolders.

    Raises:
        RequestError: The name is no text or empty, could lead out of the folder, hides the
            file, passes for an option, holds control or direction marks, or is too long.
    """
    if not isinstance(name, str) or not name:
        raise RequestError(f"file name is {shown(name)}, expected text")
    text = unicodedata.normalize("NFC", name)
    if not text.casefold().endswith(extension):
        text += extension
    for part in text.split("/"):
        if reason := _wrong(part, extension):
            raise RequestError(
                f"file name {escape_for_terminal(name, limit=100)!r} {reason}; "
                "use letters, digits and single slashes between subfolders"
            )
    return PurePosixPath(text)


def _wrong(part: str, extension: str) -> str:
    """Why a part of a name cannot be used; empty if it can."""
    bare = part.removesuffix(extension)
    if not bare or part.startswith("."):
        return "is absolute, or has a part that is empty or begins with a dot"
    if part.startswith(("~", "-")):
        return "has a part that begins with ~ or -"
    if "\\" in part or re.match(r"[A-Za-z]:", part):
        return "has a backslash or a drive letter"
    if bare != bare.rstrip(" ."):
        return "has a part that ends in a space or a dot"
    for position, character in enumerate(part):
        is_joiner = character in "\u200c\u200d"  # letters and pictographs need them
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and not is_joiner:
            return f"has a control or format character U+{ord(character):04X} at {position}"
    if _RESERVED.fullmatch(part):
        return "has a part that is a device name on other systems"
    nbytes = len(part.encode("utf-8")) + COUNTER_NBYTES
    if nbytes > MAX_NAME_NBYTES:
        return (
            f"has a part of {nbytes} bytes with extension and counter, "
            f"{MAX_NAME_NBYTES} bytes are allowed"
        )
    return ""


def name_key(name: str) -> str:
    """Equal for names that some disk takes for one: case and normal form are ignored."""
    text = unicodedata.normalize("NFC", name)
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text.upper()).casefold())


def find_collisions(names: Sequence[str]) -> list[list[int]]:
    """Positions of names that some disk takes for one, group by group."""
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        groups.setdefault(name_key(name), []).append(position)
    return [group for group in groups.values() if len(group) > 1]

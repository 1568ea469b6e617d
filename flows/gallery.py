"""Pictures on a run's page in Prefect: small ones by link, that lead to the whole ones.

The page's own server cannot show files. Links go to the server of pictures beside it, or to the
store itself where that is on the web.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.media_service import media_url
from flows.settings import RunSettings

logger = logging.getLogger(__name__)

MOST_SHOWN = 60
"""Pictures of one gallery: a page of more is slow to draw."""

PER_ROW = 3
_LABEL_LETTERS, _CAPTION_LETTERS = 24, 28  # what fits below a small picture in one line
_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_NOT_IN_A_LABEL = re.compile(r"[^\w ,.:-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A picture, or a clip, and what stands below it.

    Attributes:
        digest: sha256 of it in the store.
        prompt: Shortened to its beginning.
        label: Text of the link to the whole of it: a seed, or the id of a row.
        is_clip: Whether it has no small copy.
    """

    digest: str
    prompt: str
    label: str
    is_clip: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Where the objects of a store can be seen.

    Attributes:
        base: The server of pictures, or the store's own address.
        is_store: Whether it is the store itself, which has no small copies.
    """

    base: str
    is_store: bool

    def whole(self, digest: str) -> str:
        if self.is_store:
            return f"{self.base}/objects/sha256/{digest[:2]}/{digest}"
        return f"{self.base}/media/{digest}"

    def small(self, digest: str) -> str:
        return self.whole(digest) if self.is_store else f"{self.base}/thumbnail/{digest}"


def links_of(settings: RunSettings) -> Links | None:
    """How a page can show what the store holds; None if it cannot."""
    if settings.store_url.startswith(("http://", "https://")):
        return Links(base=settings.store_url.rstrip("/"), is_store=True)
    base = media_url(settings.home, settings.store_url)
    return None if base is None else Links(base=base, is_store=False)


def show_gallery(pictures: Sequence[Shown], noun: str) -> None:
    """Put pictures onto the page of the run around this call; one that cannot be is no error.

    Args:
        noun: What they are: `pictures` or `videos`.
    """
    links = links_of(RunSettings.from_env())
    if links is None or not pictures:
        return
    description = f"{len(pictures)} {noun}"
    if len(pictures) > MOST_SHOWN:
        description += f", the first {MOST_SHOWN} are shown"
    try:
        create_markdown_artifact(
            gallery_markdown(pictures[:MOST_SHOWN], links), key="gallery", description=description
        )
    except Exception as error:  # whatever the server says, the files are there
        logger.warning("the run's page shows no gallery: %r", error)


def gallery_markdown(pictures: Sequence[Shown], links: Links) -> str:
    """A table of pictures, each above its caption."""
    width = min(PER_ROW, len(pictures))
    lines = [_row([" "] * width), _row(["---"] * width)]
    for start in range(0, len(pictures), width):
        part = [*pictures[start : start + width]]
        gap = [""] * (width - len(part))
        lines.append(_row([_cell(each, links) for each in part] + gap))
        lines.append(_row([_caption(each, links) for each in part] + gap))
    return "\n".join(lines) + "\n"


def _cell(shown: Shown, links: Links) -> str:
    return "clip" if shown.is_clip else f"![{shown.digest[:8]}]({links.small(shown.digest)})"


def _caption(shown: Shown, links: Links) -> str:
    # Prefect's first pages show a link's text as it is typed, escapes included, and no picture
    # as a link.
    label = _NOT_IN_A_LABEL.sub("_", shown.label)[:_LABEL_LETTERS].strip() or "open"
    prompt = plain(shown.prompt, max(0, _CAPTION_LETTERS - len(label)))
    return f"[{label}]({links.whole(shown.digest)}) {prompt}".rstrip()


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(text: str, limit: int) -> str:
    """A text that Markdown shows as it is, in one line, shortened to so many letters."""
    line = " ".join(text.split())
    if len(line) > limit:
        line = line[: limit - 1].rstrip() + "\u2026" if limit > 4 else ""
    return _PUNCTUATION.sub(r"\\\1", line)

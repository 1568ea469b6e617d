"""A run's page in Prefect shows its pictures by link, whatever stands in their prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flows import gallery
from flows.gallery import Links, Shown, gallery_markdown, links_of, plain
from flows.settings import RunSettings

DIGEST = "ab" * 32
LOCAL = Links(base="http://127.0.0.1:4301", is_store=False)


def shown(prompt: str = "a fox", **fields: Any) -> Shown:
    return Shown(**{"digest": DIGEST, "prompt": prompt, "label": "seed 7"} | fields)


def test_each_picture_stands_above_its_prompt_and_a_link_to_the_whole() -> None:
    lines = gallery_markdown([shown()] * 4, LOCAL).splitlines()
    assert len(lines) == 6 and all(line.count("|") == 4 for line in lines)
    small = f"![abababab](http://127.0.0.1:4301/thumbnail/{DIGEST})"
    assert lines[2] == f"| {small} | {small} | {small} |"
    caption = f"[seed 7](http://127.0.0.1:4301/media/{DIGEST}) a fox"
    assert lines[5] == f"| {caption} |  |  |"


def test_a_store_on_the_web_is_linked_itself() -> None:
    links = Links(base="https://pictures.example/store", is_store=True)
    text = gallery_markdown([shown()], links)
    assert f"![abababab](https://pictures.example/store/objects/sha256/ab/{DIGEST})" in text


@pytest.mark.parametrize(
    "prompt",
    [
        "a | b\n| c |",
        "![x](http://evil.example/a.png)",
        "[click](javascript:alert(1))",
        "<img src=x onerror=alert(1)>",
        "`code` **bold** _it_ ~~no~~ # head",
        "&lt;b&gt; \\",
    ],
)
def test_a_prompt_is_a_text_and_nothing_else(prompt: str) -> None:
    """Every mark of punctuation is escaped, so that none of them means anything."""
    text = plain(prompt, 80)
    assert "\n" not in text
    left = text
    while "\\" in left:
        place = left.index("\\")
        left = left[:place] + left[place + 2 :]
    assert not set(left) & set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    line = gallery_markdown([shown(prompt)], LOCAL).splitlines()[3]
    assert line.replace("\\|", "").count("|") == 2


def test_a_label_cannot_end_its_link() -> None:
    text = gallery_markdown([shown(label="row](http://evil.example) [x")], LOCAL)
    assert "evil.example)" not in text and "[row_http:_evil.example_](http://127" in text


def test_a_caption_is_as_wide_as_its_picture() -> None:
    """Prefect's pages break no line in a table, and three columns are to be seen."""
    for label in ("seed 5", "an-identity-of-eighty-letters" * 4):
        line = gallery_markdown([shown("word " * 100, label=label)], LOCAL).splitlines()[3]
        seen = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line.strip("| "))
        assert 20 < len(seen) <= 29
    assert plain("word " * 100, 22) == "word word word word w\u2026"


def test_a_clip_is_a_link_alone() -> None:
    text = gallery_markdown([shown(is_clip=True)], LOCAL)
    assert "thumbnail" not in text and f"/media/{DIGEST}" in text


def test_without_a_server_of_pictures_there_is_no_gallery(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(gallery, "create_markdown_artifact", lambda *a, **k: made.append(k))
    gallery.show_gallery([shown()], "pictures")
    assert made == [] and links_of(RunSettings.from_env()) is None
    monkeypatch.setenv("EXEUNT_STORE", "https://pictures.example/store/")
    gallery.show_gallery([shown()] * 61, "pictures")
    assert [each["description"] for each in made] == ["61 pictures, the first 60 are shown"]

"""Names of rows' files: what a template makes of values, and what it refuses."""

from __future__ import annotations

import pytest

from flows.row_names import NameTemplate, file_name
from stages.errors import RequestError

FIELDS = frozenset({"id", "row", "seed", "prompt"})


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{id}", "Cat_1"),
        ("{row:05d}-{seed}", "00042-18446744073709551615"),
        ("{prompt}/{row}", "a-red-fox-in-the-snow/42"),
        ("night {{{row}}}", "night {42}"),
    ],
)
def test_a_template_is_filled_with_plain_pieces(template: str, name: str) -> None:
    values = {"id": "Cat_1", "row": 42, "seed": 2**64 - 1, "prompt": "A red fox, in the snow!"}
    assert NameTemplate(template, FIELDS).fill(values) == name


@pytest.mark.parametrize(
    "value", ["../../x", "/etc/x", "..\\..\\x", "~", "C:\\x", "x\0.png", ".", "a/b", "-", "..%2f"]
)
def test_what_is_filled_in_cannot_leave_its_place(value: str) -> None:
    made = file_name(NameTemplate("pictures/{id}", FIELDS).fill({"id": value}), ".png")
    folder, _, name = made.partition("/")
    assert folder == "pictures"
    assert not set(name) & set("/\\~:\0") and not name.startswith((".", "-"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "0 characters"),
        ("{id", "malformed"),
        ("{}", "field ''"),
        ("{id.__class__}", "field 'id.__class__'"),
        ("{id[0]}", r"field 'id\[0\]'"),
        ("{id!r}", "field 'id'"),
        ("{row:{seed}}", "field 'row'"),
        ("{height}", "field 'height'; use id, prompt, row, seed"),
    ],
)
def test_a_template_that_no_row_can_fill_is_refused(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        NameTemplate(template, FIELDS)


@pytest.mark.parametrize(
    ("name", "extension", "file"),
    [
        ("fox.png", ".jpg", "fox.jpg"),
        ("fox.JPEG", ".jpg", "fox.jpg"),
        ("a.png/fox.jpg", ".webp", "a.png/fox.webp"),
        ("FOX.PNG", ".png", "FOX.PNG"),
        ("v1.5", ".webp", "v1.5.webp"),
        ("fox.png", ".mp4", "fox.png.mp4"),
    ],
)
def test_an_ending_of_another_picture_format_gives_way(
    name: str, extension: str, file: str
) -> None:
    assert file_name(name, extension) == file


def test_a_row_that_cannot_fill_the_template_is_told() -> None:
    with pytest.raises(RequestError, match="prompt is empty in this row"):
        NameTemplate("{prompt}", FIELDS).fill({"prompt": None})
    with pytest.raises(RequestError, match="the format '05d' does not fit"):
        NameTemplate("{prompt:05d}", FIELDS).fill({"prompt": "a"})


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "~", "C:\\x", "x\0", ".", "", "-rf"])
def test_a_name_of_ones_own_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="file name"):
        file_name(name, ".png")
    assert file_name("sub/x", ".png") == "sub/x.png"

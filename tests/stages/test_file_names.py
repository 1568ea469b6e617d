"""File names are safe on every disk and stay inside their folder."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import RequestError
from stages.file_names import check_name, find_collisions, safe_stem


@pytest.mark.parametrize(
    ("prompt", "seed", "expected"),
    [
        ("A red fox, in the SNOW!", 7, "a-red-fox-in-the-snow-7"),
        ("../../etc/passwd", 7, "etc-passwd-7"),
        ("..\\..\\x", 7, "x-7"),
        ("~/.ssh/id", 7, "ssh-id-7"),
        ("-rf", 7, "rf-7"),
        ("C:\\x", None, "c-x"),
        ("con", None, "picture-con"),
        ("LPT1", None, "picture-lpt1"),
        ("con", 7, "con-7"),
        ("", 7, "picture-7"),
        ("", None, "picture"),
        ("...", None, "picture"),
        ("\U0001f98a\U0001f98a", 7, "picture-7"),
        ("cafe\u0301 \u5bcc\u58eb\u5c71", 7, "caf\u00e9-\u5bcc\u58eb\u5c71-7"),
        ("a\0b\nc\x1b[31m\u202ed", 7, "a-b-c-31m-d-7"),
        ("\u0301abc", 7, "abc-7"),
        ("\ud800x", 7, "x-7"),
        ("cat", 2**64 - 1, "cat-18446744073709551615"),
    ],
)
def test_a_prompt_becomes_a_plain_name(prompt: str, seed: int | None, expected: str) -> None:
    assert safe_stem(prompt, seed) == expected


@given(prompt=st.text(max_size=300), seed=st.none() | st.integers(0, 2**64 - 1))
def test_names_made_of_prompts_are_safe(prompt: str, seed: int | None) -> None:
    stem = safe_stem(prompt, seed)

    assert 1 <= len(stem.encode("utf-8")) <= 80
    assert unicodedata.normalize("NFC", stem) == stem
    assert not set(stem) & set('/\\.:~ \0\n\t*?"<>|')
    assert not stem.startswith("-")
    assert not stem.endswith("-")
    assert unicodedata.category(stem[0])[0] in "LN"
    assert seed is None or stem.endswith(f"-{seed}")
    assert check_name(stem).name == f"{stem}.png"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cat", "cat.png"),
        ("cat.png", "cat.png"),
        ("cat.PNG", "cat.PNG"),
        ("cat.jpg", "cat.jpg.png"),
        ("sub/x", "sub/x.png"),
        ("a/b/c d (1)", "a/b/c d (1).png"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680.png"),
        ("cafe\u0301", "caf\u00e9.png"),
        ("\uff0e\uff0e", "\uff0e\uff0e.png"),  # full-width dots are plain characters
        ("%2e%2e%2fx", "%2e%2e%2fx.png"),  # never decoded
        ("x" * 246, "x" * 246 + ".png"),
    ],
)
def test_a_users_own_name_is_kept(name: str, expected: str) -> None:
    assert str(check_name(name)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "../../x", "/etc/x", "..\\..\\x", "a/../../x", "~", "~/x", "~root/x", "C:\\x", "C:x",
        "\\\\host\\share", "x\0.png", ".", "..", "", "-rf", "a/-rf", "....//", "a//b", "a/", "/",
        ".hidden", "a/.hidden/x", "..%2f", "x\u202egnp.exe", "x\u200f", "a\nb", "a\x7fb",
        "a\x1b[0m",
        "a\u2028b", "\ud800", "con", "sub/NUL", "aux.png", "cat ", "cat.", "sub /x", ".png",
        None, 5, "x" * 247, "x" * 255, "x" * 256, "é" * 124, "sub/" + "x" * 300,
    ],
)  # fmt: skip
def test_a_name_that_could_do_harm_is_refused(name: object) -> None:
    with pytest.raises(RequestError, match="file name") as caught:
        check_name(name)
    assert len(str(caught.value)) < 400
    str(caught.value).encode("utf-8")
    assert not set(str(caught.value)) & set("\0\n\x1b\u202e")


def test_names_that_some_disk_takes_for_one_collide() -> None:
    names = [
        "Cat", "dog", "cat", "CAT", "stra\u00dfe", "STRASSE", "caf\u00e9", "cafe\u0301",
        "fo\u0131o", "FOIO", "\u0130x", "i\u0307x", "sub/Cat",
    ]  # fmt: skip

    assert find_collisions(names) == [[0, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_different_names_do_not_collide() -> None:
    assert find_collisions(["cat", "cat-2", "sub/cat", "kat", ""]) == []

"""The command line is the flow's signature."""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from flows.cli_arguments import add_flow_arguments, argument_texts


def paint(
    prompt: str | list[str],
    seed: int | str = -1,
    num_images: Annotated[int, Field(ge=1)] = 1,
    guidance_scale: float | None = None,
    mode: Literal["warn", "error"] = "warn",
    embed_settings: bool = True,
) -> None:
    """Paint something.

    Args:
        prompt: What to paint.
        seed: A number
            on two lines.
        guidance_scale: Weight, 100 % or more.

    Returns:
        Nothing.
    """


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flow_arguments(parser, paint)
    return vars(parser.parse_args(arguments))


def test_defaults_are_the_functions_own() -> None:
    assert parse("--prompt", "a") == {
        "prompt": ["a"],
        "seed": -1,
        "num_images": 1,
        "guidance_scale": None,
        "mode": "warn",
        "embed_settings": True,
    }


def test_options_are_converted_by_their_hints() -> None:
    seed = str(2**64 - 1)
    values = parse(
        *("--prompt", "a", "--prompt", "b", "--seed", seed, "--num-images", "3"),
        *("--guidance-scale", "4.5", "--no-embed-settings", "--mode", "error"),
    )
    assert values["prompt"] == ["a", "b"]
    assert values["seed"] == seed  # text: kept exact, whatever its size
    assert values["num_images"] == 3
    assert values["guidance_scale"] == 4.5
    assert values["embed_settings"] is False
    assert values["mode"] == "error"


@pytest.mark.parametrize("arguments", [[], ["--prompt", "a", "--mode", "shout"]])
def test_a_missing_or_wrong_argument_ends_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2


def test_help_texts_come_from_the_docstring() -> None:
    assert argument_texts(paint) == {
        "prompt": "What to paint.",
        "seed": "A number on two lines.",
        "guidance_scale": "Weight, 100 % or more.",
    }


def test_help_is_printed_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "--num-images N" in text and "(default: 1)" in text and "100 % or more" in text

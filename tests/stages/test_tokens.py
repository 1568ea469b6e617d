"""What a text encoder does not read is told in the user's own words."""

from __future__ import annotations

from typing import Any

import pytest

from stages.tokens import TokenUse, token_use, truncation_sentence
from tests.support.tiny_models import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


def use(tokenizer: Any, text: str, limit: int, *, chat_template: bool = True) -> TokenUse:
    return token_use(
        tokenizer,
        text,
        prompt="prompt",
        encoder="text_encoder",
        limit=limit,
        chat_template=chat_template,
    )


def test_a_short_prompt_loses_nothing(tokenizer: Any) -> None:
    found = use(tokenizer, "a small red fox", 64)
    assert found.tokens_used == found.tokens_total <= 64
    assert found.dropped_text == ""


@pytest.mark.parametrize("text", ["red " * 300, "لوحة " * 90, "👩‍🎨" * 60, "a\u200fb\ufeff " * 80])
def test_kept_and_dropped_text_make_up_the_prompt(tokenizer: Any, text: str) -> None:
    found = use(tokenizer, text, 32, chat_template=False)
    assert found.tokens_used == 32
    assert found.dropped_text and text.endswith(found.dropped_text)


def test_the_template_is_never_reported_as_lost_text(tokenizer: Any) -> None:
    found = use(tokenizer, "red " * 40 + "fox", 45)
    assert "<|im_end|>" not in found.dropped_text
    nearly = use(tokenizer, "red fox", use(tokenizer, "red fox", 999).tokens_total - 1)
    assert nearly.tokens_total == nearly.tokens_used + 1 and nearly.dropped_text == ""


def test_a_prompt_is_passed_on_unchanged_newlines_and_brackets_too(tokenizer: Any) -> None:
    """No weight syntax is read: text goes to the tokenizer as it was typed."""
    text = "a cat\n(red:1.4) dog, portrait (photo \\(medium\\))"
    plain = len(tokenizer(text)["input_ids"])
    assert use(tokenizer, text, 999, chat_template=False).tokens_total == plain


def test_the_sentence_names_encoder_limit_and_loss(tokenizer: Any) -> None:
    found = use(tokenizer, "red " * 300 + "hedgehog", 32)
    text = truncation_sentence(found.as_json(), 32)
    assert "text_encoder reads 32" in text and len(text) < 400

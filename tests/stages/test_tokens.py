"""What a text encoder does not read is told in the user's own words."""

from __future__ import annotations

from typing import Any

import pytest

from stages.families import Reading
from stages.families.family import CHAT, CHAT_WITHOUT_THINKING
from stages.tokens import TokenUse, token_use, truncation_sentence
from tests.support.tiny_tokenizers import byte_level_tokenizer, clip_tokenizer, t5_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer()


def use(tokenizer: Any, text: str, limit: int, *, chat_template: bool = True) -> TokenUse:
    reading = Reading(encoder="text_encoder", template=CHAT if chat_template else "")
    return token_use(tokenizer, text, reading, prompt="prompt", limit=limit)


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
    text = truncation_sentence(found.as_json())
    assert "text_encoder reads 32" in text and len(text) < 400


@pytest.mark.parametrize("make", [clip_tokenizer, t5_tokenizer])
def test_the_cut_leaves_room_for_the_token_that_closes_every_text(make: Any) -> None:
    """The encoder reads 16 tokens; the closing one is among them, so one less of the text."""
    tokenizer, text = make(), "abcdefgh " * 5
    found = token_use(tokenizer, text, Reading(encoder="text_encoder"), prompt="prompt", limit=16)
    read = tokenizer(text, truncation=True, max_length=16)["input_ids"]
    kept = tokenizer.decode(read, skip_special_tokens=True).strip()
    assert found.tokens_used == len(read) == 16
    assert kept.replace(" ", "") + found.dropped_text.replace(" ", "") == text.replace(" ", "")


def test_a_tokenizer_may_have_a_limit_of_its_own() -> None:
    reading = Reading(encoder="text_encoder", limit="own")
    found = token_use(clip_tokenizer(), "abcdefgh " * 50, reading, prompt="prompt", limit=512)
    assert found.tokens_used == 77


def test_tokens_of_a_template_that_no_limit_counts_are_not_told(tokenizer: Any) -> None:
    where = "diffusers.modular_pipelines.qwenimage.prompt_templates:QWENIMAGE_PROMPT_TEMPLATE"
    plain = Reading(encoder="text_encoder", template=where)
    counted = Reading(encoder="text_encoder", template=where, num_unread=34)
    text = "red " * 60 + "hedgehog"
    full = token_use(tokenizer, text, plain, prompt="prompt", limit=999)
    less = token_use(tokenizer, text, counted, prompt="prompt", limit=full.tokens_total - 34)
    assert less.tokens_used == less.tokens_total == full.tokens_total - 34
    cut = token_use(tokenizer, text, counted, prompt="prompt", limit=less.tokens_total - 60)
    assert cut.dropped_text and text.endswith(cut.dropped_text)


def test_thinking_is_turned_off_where_the_pipeline_turns_it_off(tokenizer: Any) -> None:
    thoughtful = byte_level_tokenizer()
    thoughtful.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    lengths = [
        token_use(
            thoughtful, "a fox", Reading(encoder="e", template=template), prompt="p", limit=999
        ).tokens_total
        for template in (CHAT, CHAT_WITHOUT_THINKING)
    ]
    assert lengths[0] > lengths[1]


def test_the_sentence_shows_invisible_marks_as_escapes() -> None:
    found = TokenUse(
        prompt="prompt",
        encoder="text_encoder",
        tokens_total=70,
        tokens_used=64,
        dropped_text="a\u200f\u061c\ufeffb\x1b[31m",
    )
    text = truncation_sentence(found.as_json())
    assert text.endswith(r"dropped: 'a\u200f\u061c\ufeffb\x1b[31m'")

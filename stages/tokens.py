"""How much of a prompt a text encoder reads, known before the encoder loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LONGEST_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUse:
    """What became of one prompt in one tokenizer.

    Attributes:
        prompt: Which one: `prompt` or `negative_prompt`.
        encoder: The text encoder that the tokenizer feeds.
        tokens_total: Tokens of the whole prompt, its template included.
        tokens_used: Tokens that the encoder reads, at most the limit.
        dropped_text: The end of the prompt that the encoder never sees; empty when none.
    """

    prompt: str
    encoder: str
    tokens_total: int
    tokens_used: int
    dropped_text: str

    def as_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def truncation_sentence(use: Mapping[str, Any], limit: int) -> str:
    """A truncated prompt for people, with the numbers and at most 200 of the lost characters.

    Args:
        use: The fields of a `TokenUse`.
        limit: Tokens that the encoder reads.
    """
    lost = use["dropped_text"]
    lost = lost if len(lost) <= LONGEST_SHOWN else f"{lost[: LONGEST_SHOWN - 1]}…"
    return (
        f"{use['prompt']} has {use['tokens_total']} tokens but {use['encoder']} reads {limit}; "
        f"dropped: {lost!r}"
    )


def token_use(
    tokenizer: Any, text: str, *, prompt: str, encoder: str, limit: int, chat_template: bool
) -> TokenUse:
    """Count a prompt's tokens and find what the limit cuts off.

    Args:
        tokenizer: A fast tokenizer of transformers.
        limit: Most tokens that the encoder is given.
        chat_template: Put the prompt into the tokenizer's template first, as the pipeline does.
    """
    rendered = text
    if chat_template:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
    encoded = tokenizer(rendered, return_offsets_mapping=True, truncation=False, verbose=False)
    total = len(encoded["input_ids"])
    dropped = ""
    if total > limit:
        cut = encoded["offset_mapping"][limit][0]
        start = max(rendered.find(text), 0)
        dropped = rendered[max(cut, start) : start + len(text)]
    return TokenUse(
        prompt=prompt,
        encoder=encoder,
        tokens_total=total,
        tokens_used=min(total, limit),
        dropped_text=dropped,
    )

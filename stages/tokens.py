"""How much of a prompt a text encoder reads, known before the encoder loads."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stages.families import Reading
from stages.families.family import CHAT, CHAT_WITHOUT_THINKING

LONGEST_SHOWN = 200

_INSTRUCTED = 2
"""Tokens of an instruction that stay in the limit: pipelines read the first and the last one."""


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


def truncation_sentence(use: Mapping[str, Any]) -> str:
    """A truncated prompt for people, with the numbers and at most 200 of the lost characters.

    Args:
        use: The fields of a `TokenUse`.
    """
    lost = use["dropped_text"]
    lost = lost if len(lost) <= LONGEST_SHOWN else f"{lost[: LONGEST_SHOWN - 1]}…"
    return (
        f"{use['prompt']} has {use['tokens_total']} tokens but {use['encoder']} reads "
        f"{use['tokens_used']}; dropped: {lost!r}"
    )


def token_use(
    tokenizer: Any, text: str, reading: Reading, *, prompt: str, limit: int | None
) -> TokenUse:
    """Count a prompt's tokens and find what the limit cuts off.

    Args:
        tokenizer: A fast tokenizer of transformers.
        reading: How the pipeline uses it.
        prompt: Which one the text is.
        limit: Most tokens that the encoder is given, by the request; None leaves it to the
            tokenizer, as the reading may too.
    """
    if isinstance(reading.limit, int):
        limit = reading.limit
    elif limit is None or reading.limit == "own":
        limit = int(tokenizer.model_max_length)
    if reading.is_lowered:
        text = text.lower().strip()
    rendered = _rendered(tokenizer, text, reading)
    num_unread, instruction = reading.num_unread, ""
    if reading.instruction and prompt == "prompt":
        instruction = _instruction(reading)
        rendered = instruction + rendered
        num_unread += len(tokenizer.encode(instruction)) - _INSTRUCTED
    encoded = tokenizer(
        rendered,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        truncation=False,
        verbose=False,
    )
    total = len(encoded["input_ids"]) - num_unread
    dropped = ""
    if total > limit:
        last = limit + num_unread - _num_closing(encoded["special_tokens_mask"])
        cut = encoded["offset_mapping"][last][0]
        start = max(rendered.find(text, len(instruction)), 0)
        dropped = rendered[max(cut, start) : start + len(text)]
    return TokenUse(
        prompt=prompt,
        encoder=reading.encoder,
        tokens_total=total,
        tokens_used=min(total, limit),
        dropped_text=dropped,
    )


def _rendered(tokenizer: Any, text: str, reading: Reading) -> str:
    """A prompt in its template, as the pipeline renders it."""
    template = reading.template
    if not template:
        return text
    if template in (CHAT, CHAT_WITHOUT_THINKING):
        before = [{"role": "system", "content": _system(reading)}] if reading.system else []
        rendered: str = tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=template == CHAT,
        )
        return rendered
    module, _, name = template.partition(":")
    around: str = getattr(importlib.import_module(module), name)
    return around.format(text)


def _instruction(reading: Reading) -> str:
    """The lines that a pipeline's call puts before a prompt by default."""
    module, _, name = reading.instruction.partition(":")
    owner, _, argument = name.partition(".")
    call = getattr(importlib.import_module(module), owner).__call__
    lines: list[str] = inspect.signature(call).parameters[argument].default
    return "\n".join(lines)


def _system(reading: Reading) -> str:
    """The text that a pipeline's class says before each prompt."""
    module, _, name = reading.system.partition(":")
    owner, _, attribute = name.partition(".")
    found: str = getattr(getattr(importlib.import_module(module), owner), attribute).fget(None)
    return found


def _num_closing(is_special: list[int]) -> int:
    """Tokens that a tokenizer adds after every text, whatever it cuts off before them."""
    return next((n for n, flag in enumerate(reversed(is_special)) if not flag), 0)

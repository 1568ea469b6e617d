"""Tiny tokenizers, made in memory out of a few sentences."""

from __future__ import annotations

import json
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "a small red fox in the snow, watercolour",
    "a robot dancing under city lights at night",
    "low quality, blurry",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400) -> Any:
    """A Qwen2 tokenizer whose byte-level merges come from a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    made = transformers.Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def clip_tokenizer() -> Any:
    """A CLIP tokenizer without merges: each byte is a token, 77 of them are read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(f"{each}</w>" for each in alphabet)]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """A T5 tokenizer of single characters."""
    characters = sorted({c for text in CORPUS for c in text} - {" "} | set("ABCXYZ0123456789.!?'-"))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(character, -3.0) for character in characters]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)

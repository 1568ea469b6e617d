"""The miniature's own tokenizer: byte-level BPE in the layout of Qwen2, trained on its captions.

Every byte is a token, so no prompt is unknown; words of the grammar are one token each.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from stages.miniature.captions import describe, unrelated
from stages.miniature.grammar import sample_scene

VOCAB_SIZE = 768
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wrap(caption: str) -> str:
    """The text that the pipeline's chat template makes of one caption; a test compares them."""
    return f"{TURN_START}user\n{caption}{TURN_END}\n{TURN_START}assistant\n"


def train_tokenizer(*, seed: int = 0, num_captions: int = 20_000) -> Any:
    """A `Qwen2Tokenizer` whose merges were learnt from captions of the grammar."""
    import transformers
    from tokenizers import Tokenizer, models, trainers

    untrained = transformers.Qwen2Tokenizer(vocab={END_OF_TEXT: 0}, merges=[])
    learner = Tokenizer(models.BPE())
    learner.normalizer = untrained.backend_tokenizer.normalizer
    learner.pre_tokenizer = untrained.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=_byte_alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(_corpus(seed, num_captions), trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        model_max_length=512,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _corpus(seed: int, num_captions: int) -> Iterator[str]:
    rng = Random(seed)
    for _ in range(num_captions):
        yield wrap(describe(sample_scene(rng), rng))
        yield unrelated(rng, 3)

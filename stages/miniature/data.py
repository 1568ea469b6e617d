"""What the miniature is trained on: drawn at random, worded, tokenized, as arrays.

Held-out scenes never enter. The chunks are made by worker processes and depend on the seed alone.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.miniature.captions import describe, unrelated
from stages.miniature.draw import pack
from stages.miniature.forward import PAD_MULTIPLE
from stages.miniature.grammar import place, sample_scene
from stages.miniature.recipe import MAX_CAPTION_TOKENS
from stages.miniature.tokenizer import wrap

_CHUNK = 2_000
_EMPTY_SHARE = 0.08  # captions replaced by the empty one, so that guidance has its other side
_UNRELATED_SHARE = 0.02  # captions that say nothing of the picture: any scene is right for them


@dataclass(frozen=True)
class Captions:
    """All captions that fill the same multiple of 32 tokens.

    Token ids `(M, L)` int16 padded with 0, lengths `(M,)` int16, and the picture that each
    describes, `(M,)` int32, an index into the pictures.
    """

    ids: Tensor
    lengths: Tensor
    picture: Tensor


@dataclass(frozen=True)
class Corpus:
    """N packed placements (see `draw.pack`) and their captions by padded length."""

    figures: Tensor
    backgrounds: Tensor
    captions: dict[int, Captions]


def make_corpus(
    num_pictures: int,
    captions_each: int,
    tokenizer_file: Path,
    *,
    seed: int = 0,
    num_workers: int = 1,
) -> Corpus:
    """Draw scenes outside the held-out tenth and word each of them several times.

    Same arguments, same corpus, whatever `num_workers` is.
    """
    sizes = [min(_CHUNK, num_pictures - start) for start in range(0, num_pictures, _CHUNK)]
    jobs = [
        (seed * 1_000_003 + i, size, captions_each, tokenizer_file) for i, size in enumerate(sizes)
    ]
    if num_workers > 1:
        # spawned, since a fork of a process whose torch has started its threads can hang
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            chunks = list(pool.map(_make_chunk, jobs))
    else:
        chunks = [_make_chunk(job) for job in jobs]
    figures, backgrounds, ids, lengths = (
        torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*chunks, strict=True)
    )
    picture = torch.arange(num_pictures, dtype=torch.int32).repeat_interleave(captions_each)
    captions = {}
    for padded in range(PAD_MULTIPLE, MAX_CAPTION_TOKENS + 1, PAD_MULTIPLE):
        chosen = (lengths > padded - PAD_MULTIPLE) & (lengths <= padded)
        captions[padded] = Captions(ids[chosen, :padded], lengths[chosen], picture[chosen])
    return Corpus(figures, backgrounds, captions)


def _make_chunk(job: tuple[int, int, int, Path]) -> tuple[NDArray[Any], ...]:
    """Placements and captions of one chunk; ids `(pictures * captions, 64)` int16 and lengths."""
    from tokenizers import Tokenizer

    seed, num_pictures, captions_each, tokenizer_file = job
    rng = Random(seed)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    placements = []
    ids = np.zeros((num_pictures * captions_each, MAX_CAPTION_TOKENS), dtype=np.int16)
    lengths = np.zeros(num_pictures * captions_each, dtype=np.int16)
    row = 0
    for _ in range(num_pictures):
        scene = sample_scene(rng)
        placements.append(place(scene, rng))
        for _ in range(captions_each):
            tokens = [0] * (MAX_CAPTION_TOKENS + 1)
            while len(tokens) > MAX_CAPTION_TOKENS:
                caption = describe(scene, rng)
                chance = rng.random()
                if chance < _EMPTY_SHARE:
                    caption = ""
                elif chance < _EMPTY_SHARE + _UNRELATED_SHARE:
                    caption = unrelated(rng, rng.randint(1, 8))
                tokens = tokenizer.encode(wrap(caption)).ids
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
            row += 1
    figures, backgrounds = pack(placements)
    return figures.numpy(), backgrounds.numpy(), ids, lengths

"""Train the miniature model: `python -m stages.miniature.train --out DIR --device cuda`.

First the autoencoder, then the text encoder and the transformer together. The clock decides how
far it gets; a run that was stopped goes on from its last save when started again with the same
`--out`. `--judge MODULE:FUNCTION` names a function `(picture, scene) -> object with .ok` that
scores held-out captions as training goes.
"""

import argparse
import importlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from stages.miniature.build import build_pipeline, save_pipeline
from stages.miniature.captions import describe
from stages.miniature.data import Corpus, make_corpus
from stages.miniature.draw import pack
from stages.miniature.grammar import Scene, place, sample_scene
from stages.miniature.recipe import GUIDANCE_SCALE, NUM_INFERENCE_STEPS
from stages.miniature.sample import decode, sample
from stages.miniature.train_denoiser import DenoiserTrainer
from stages.miniature.train_vae import KL_WEIGHT, encode, train_vae

_log = logging.getLogger("miniature")

_MIN_RECONSTRUCTED = 0.9

Judge = Callable[[Any, Scene], Any]


def main() -> None:
    """Run the training that the command line asks for."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    pipeline = _load_or_build(options.out, options.seed)
    corpus = _load_or_make_corpus(options)
    _log.info(
        "%d pictures, captions %s",
        len(corpus.figures),
        {k: len(v.ids) for k, v in corpus.captions.items()},
    )
    pipeline.to(options.device)
    judge = _judge(options.judge)
    if "vae" in options.parts and not _state_file(options.out).exists():
        train_vae(
            pipeline.vae,
            corpus,
            minutes=options.vae_minutes,
            batch_size=options.vae_batch,
            seed=options.seed,
            kl_weight=options.kl_weight,
            learning_rate=options.vae_learning_rate,
        )
        save_pipeline(pipeline, options.out)
        if judge is not None:
            _check_vae(pipeline.vae, judge)
    if "denoiser" in options.parts:
        _train_denoiser(pipeline, corpus, judge, options)


def _train_denoiser(
    pipeline: Any, corpus: Corpus, judge: Judge | None, options: argparse.Namespace
) -> None:
    torch.manual_seed(options.seed)
    trainer = DenoiserTrainer(
        pipeline,
        corpus,
        _scaled_latents(pipeline.vae, corpus, torch.device(options.device)),
        batch_size=options.batch,
        learning_rate=options.learning_rate,
        compile_layers=options.compile,
    )
    state_file = _state_file(options.out)
    elapsed_s, best = 0.0, -1.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=False, map_location=options.device)
        trainer.restore(state["trainer"])
        elapsed_s, best = state["elapsed_s"], state["best"]
        _log.info("going on at step %d", trainer.num_steps)
    limit_s, lengths = 60 * options.minutes, list(trainer.shares)
    choose = Random(options.seed + trainer.num_steps)
    start, probed = time.monotonic() - elapsed_s, time.monotonic()
    counted, counted_at = 0, time.monotonic()
    while True:
        elapsed_s = time.monotonic() - start
        is_last = elapsed_s >= limit_s
        if is_last or time.monotonic() - probed > 60 * options.probe_minutes:
            loss, rate = (
                trainer.take_loss(max(counted, 1)),
                counted / (time.monotonic() - counted_at),
            )
            score = _probe(pipeline, trainer, judge, 500 if is_last else 100)
            _log.info(
                "step %d, %.0f %%, loss %.4f, %.1f steps/s, judged right %s",
                trainer.num_steps, 100 * elapsed_s / limit_s, loss, rate, score,
            )  # fmt: skip
            if score is None or score >= best or is_last:
                best = max(best, score or 0.0)
                _save(pipeline, trainer, options.out)
            partial = state_file.with_suffix(".partial")
            torch.save({"trainer": trainer.state(), "elapsed_s": elapsed_s, "best": best}, partial)
            partial.replace(state_file)
            probed = time.monotonic()
            counted, counted_at = 0, probed
        if is_last:
            return
        for _ in range(20):
            length = choose.choices(lengths, weights=list(trainer.shares.values()))[0]
            trainer.step(length, progress=elapsed_s / limit_s)
            counted += 1
        if options.device == "cuda":
            torch.cuda.synchronize()  # so that the clock counts work done, not work queued


def _scaled_latents(vae: Any, corpus: Corpus, device: torch.device) -> Tensor:
    """Latents of every picture `(N, C, 16, 16)`, scaled as the pipeline scales; bfloat16."""
    parts = []
    for start in range(0, len(corpus.figures), 8192):
        some = slice(start, start + 8192)
        figures, backgrounds = corpus.figures[some].to(device), corpus.backgrounds[some].to(device)
        latents = encode(vae, figures, backgrounds)
        scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        parts.append(scaled.bfloat16())
    return torch.cat(parts)


def _count_right(judge: Judge, pictures: list[Image.Image], scenes: list[Scene]) -> int:
    return sum(
        bool(judge(picture, scene).ok) for picture, scene in zip(pictures, scenes, strict=True)
    )


def _check_vae(vae: Any, judge: Judge, *, num_pictures: int = 100) -> None:
    """Stop when the autoencoder cannot show the scenes: a denoiser over it would be wasted."""
    rng = Random(1)
    scenes = [sample_scene(rng) for _ in range(num_pictures)]
    figures, backgrounds = pack([place(scene, rng) for scene in scenes])
    latents = encode(vae, figures.to(vae.device), backgrounds.to(vae.device))
    scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    pictures = decode(vae, scaled)
    right = _count_right(judge, pictures, scenes)
    _log.info("%d of %d reconstructions judged right", right, num_pictures)
    if right < _MIN_RECONSTRUCTED * num_pictures:
        raise SystemExit("the autoencoder is too poor to go on with; raise --vae-minutes")


def _probe(
    pipeline: Any, trainer: DenoiserTrainer, judge: Judge | None, num_captions: int
) -> float | None:
    """Share of held-out captions that the averaged weights paint right."""
    if judge is None:
        return None
    rng = Random(num_captions)
    scenes = [sample_scene(rng, held_out=True) for _ in range(num_captions)]
    captions = [describe(scene, rng) for scene in scenes]
    with _Averaged(pipeline, trainer):
        pictures = sample(
            pipeline,
            captions,
            num_inference_steps=NUM_INFERENCE_STEPS,
            guidance_scale=GUIDANCE_SCALE,
        )
    right = _count_right(judge, pictures, scenes)
    return right / num_captions


def _save(pipeline: Any, trainer: DenoiserTrainer, out: Path) -> None:
    with _Averaged(pipeline, trainer):
        save_pipeline(pipeline, out)


def _state_file(out: Path) -> Path:
    return out.with_suffix(".state.pt")


class _Averaged:
    """Puts the averaged modules into the pipeline for as long as it is entered."""

    def __init__(self, pipeline: Any, trainer: DenoiserTrainer) -> None:
        self._pipeline, self._averaged = pipeline, trainer.averaged
        self._trained = (pipeline.text_encoder, pipeline.transformer)

    def __enter__(self) -> None:
        self._pipeline.text_encoder, self._pipeline.transformer = self._averaged

    def __exit__(self, *_: object) -> None:
        self._pipeline.text_encoder, self._pipeline.transformer = self._trained


def _load_or_build(out: Path, seed: int) -> Any:
    if (out / "model_index.json").exists():
        import diffusers

        return diffusers.ZImagePipeline.from_pretrained(out)
    pipeline = build_pipeline(seed=seed)
    save_pipeline(pipeline, out)
    return pipeline


def _load_or_make_corpus(options: argparse.Namespace) -> Corpus:
    if options.corpus and options.corpus.exists():
        corpus: Corpus = torch.load(options.corpus, weights_only=False)
        return corpus
    corpus = make_corpus(
        options.pictures,
        options.captions_each,
        options.out / "tokenizer" / "tokenizer.json",
        seed=options.seed,
        num_workers=options.workers,
    )
    if options.corpus:
        torch.save(corpus, options.corpus)
    return corpus


def _judge(name: str | None) -> Judge | None:
    if name is None:
        return None
    module, _, function = name.partition(":")
    judge: Judge = getattr(importlib.import_module(module), function)
    return judge


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the model, made or gone on with"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="for text encoder and transformer"
    )
    parser.add_argument("--vae-minutes", type=float, default=2.1)
    parser.add_argument(
        "--parts", nargs="+", choices=("vae", "denoiser"), default=["vae", "denoiser"]
    )
    parser.add_argument("--vae-learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--kl-weight", type=float, default=KL_WEIGHT)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vae-batch", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--pictures", type=int, default=500_000)
    parser.add_argument("--corpus", type=Path, help="file to keep the pictures and captions in")
    parser.add_argument("--captions-each", type=int, default=4)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--probe-minutes", type=float, default=1.0)
    parser.add_argument("--judge", help="MODULE:FUNCTION that scores a picture against its scene")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

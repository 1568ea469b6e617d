"""How often the miniature paints what a held-out caption says.

Captions come from scenes that training never saw, pictures from `ZImagePipeline` as shipped, and
each picture is judged whole: background, number, shapes, colours, sizes and relation all right.
Run `python -m tests.benchmarks.miniature`.
"""

import argparse
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

from stages.miniature import GUIDANCE_SCALE, IMAGE_SIZE_PX, MODEL_DIR, NUM_INFERENCE_STEPS
from stages.miniature.captions import describe
from stages.miniature.draw import draw
from stages.miniature.grammar import Scene, place, sample_scene
from tests.support.judge import Verdict, judge


def held_out_captions(count: int, *, seed: int = 500) -> list[tuple[Scene, str]]:
    """So many held-out scenes, each with one wording; the same for the same seed."""
    rng = Random(seed)
    scenes = [sample_scene(rng, held_out=True) for _ in range(count)]
    return [(scene, describe(scene, rng)) for scene in scenes]


def paint(
    pipeline: Any,
    captions: Sequence[str],
    *,
    num_inference_steps: int = NUM_INFERENCE_STEPS,
    guidance_scale: float = GUIDANCE_SCALE,
    batch_size: int = 25,
    seed: int = 0,
) -> Iterator[Image.Image]:
    """One picture for each caption, from a CPU generator per caption: its number plus `seed`."""
    for start in range(0, len(captions), batch_size):
        some = list(captions[start : start + batch_size])
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(some))]
        yield from pipeline(
            some,
            height=IMAGE_SIZE_PX,
            width=IMAGE_SIZE_PX,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generators,
        ).images


def tally(scenes: Sequence[Scene], verdicts: Sequence[Verdict]) -> dict[str, tuple[int, int]]:
    """Right and all, in total and for each relation, shape, colour, background and number."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for scene, verdict in zip(scenes, verdicts, strict=True):
        labels = {"all", f"shapes: {len(scene.figures)}", f"background: {scene.background}"}
        if len(scene.figures) == 2:
            labels.add(f"relation: {scene.relation}")
        for figure in scene.figures:
            labels |= {f"shape: {figure.shape}", f"colour: {figure.colour}", f"size: {figure.size}"}
        for label in labels:
            counts[label][0] += verdict.ok
            counts[label][1] += 1
    return {label: (right, total) for label, (right, total) in sorted(counts.items())}


def main() -> None:
    """Print the figures that the model card states."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--steps", type=int, default=NUM_INFERENCE_STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE_SCALE)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--seed", type=int, default=500)
    parser.add_argument("--failures", type=Path, help="folder for the pictures judged wrong")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    pipeline = diffusers.ZImagePipeline.from_pretrained(
        options.model, torch_dtype=getattr(torch, options.dtype)
    ).to(options.device)
    pipeline.set_progress_bar_config(disable=True)
    pairs = held_out_captions(options.count, seed=options.seed)
    scenes = [scene for scene, _ in pairs]
    _print_reconstructions(pipeline.vae, scenes[:200])
    start = time.perf_counter()
    pictures = list(
        paint(
            pipeline,
            [caption for _, caption in pairs],
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            batch_size=options.batch,
        )
    )
    elapsed_s = time.perf_counter() - start
    verdicts = [judge(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    for (_, caption), picture, verdict in zip(pairs, pictures, verdicts, strict=True):
        if not verdict.ok:
            print(f"wrong: {caption!r}: {'; '.join(verdict.problems)}")
            if options.failures:
                options.failures.mkdir(parents=True, exist_ok=True)
                picture.save(options.failures / f"{caption[:80].replace('/', ' ')}.png")
    for label, (right, total) in tally(scenes, verdicts).items():
        print(f"{label:24} {right:4} of {total:4}  {100 * right / total:5.1f} %")
    print(
        f"{options.steps} steps, guidance {options.guidance}, {options.dtype} on {options.device}, "
        f"batches of {options.batch}: {elapsed_s / options.count:.3f} s a picture; "
        f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
    )


def _print_reconstructions(vae: Any, scenes: Sequence[Scene]) -> None:
    """How the judge takes drawings, and the same through the autoencoder."""
    rng = Random(1)
    drawings = [draw(place(scene, rng)) for scene in scenes]
    direct = sum(judge(drawing, scene).ok for drawing, scene in zip(drawings, scenes, strict=True))
    right = 0
    for drawing, scene in zip(drawings, scenes, strict=True):
        levels = torch.frombuffer(bytearray(drawing.tobytes()), dtype=torch.uint8)
        pixels = levels.view(1, IMAGE_SIZE_PX, IMAGE_SIZE_PX, 3).permute(0, 3, 1, 2)
        with torch.no_grad():
            latents = vae.encode((pixels / 127.5 - 1).to(vae.device, vae.dtype)).latent_dist.mean
            painted = vae.decode(latents).sample
        back = ((painted.float() / 2 + 0.5).clamp(0, 1) * 255).round().byte().cpu()
        right += judge(Image.fromarray(back[0].permute(1, 2, 0).numpy()), scene).ok
    print(f"drawings judged right: {direct} of {len(scenes)}, reconstructed: {right}")


if __name__ == "__main__":
    main()

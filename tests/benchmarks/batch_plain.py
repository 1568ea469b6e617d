"""The rows of a table in a plain diffusers loop: one process, one pipeline, loaded once.

usage: python -m tests.benchmarks.batch_plain TABLE.csv FOLDER MODEL (modular | classic)
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Paint every row and save it as PNG, as people do."""
    table, folder, model, kind = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    settings = json.loads((Path(model) / "exeunt.json").read_text())
    paint = (modular if kind == "modular" else classic)(model, settings)
    with Path(table).open(newline="") as file:
        for row in csv.DictReader(file):
            generator = torch.Generator().manual_seed(int(row["seed"]))
            image = paint(row["prompt"], int(row["height"]), int(row["width"]), generator)
            image.save(Path(folder) / f"{row['id']}.png")


def modular(model: str, settings: dict[str, Any]) -> Any:
    """diffusers' modular pipeline, whose blocks the stages run."""
    import diffusers

    pipe = diffusers.ZImageModularPipeline(pretrained_model_name_or_path=model)
    pipe.load_components(dtype=torch.float32)
    # This family's guider is off unless it is told otherwise, and drops the negative half.
    guider = pipe.guider.new(guidance_scale=settings["guidance_scale"], enabled=True)
    pipe.update_components(guider=guider)
    pipe.set_progress_bar_config(disable=True)

    def paint(prompt: str, height: int, width: int, generator: Any) -> Any:
        return pipe(
            prompt=prompt,
            negative_prompt="",
            height=height,
            width=width,
            num_inference_steps=settings["num_inference_steps"],
            generator=generator,
            output="images",
        )[0]

    return paint


def classic(model: str, settings: dict[str, Any]) -> Any:
    """diffusers' classic pipeline, which computes both halves of guidance in one call."""
    import diffusers

    pipe = diffusers.ZImagePipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def paint(prompt: str, height: int, width: int, generator: Any) -> Any:
        return pipe(
            prompt=prompt,
            negative_prompt="",
            height=height,
            width=width,
            num_inference_steps=settings["num_inference_steps"],
            guidance_scale=settings["guidance_scale"],
            generator=generator,
        ).images[0]

    return paint


if __name__ == "__main__":
    main()

"""What a caller of the miniature model needs to know: where it lies and how to run it."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
IMAGE_SIZE_PX = 128
"""The only width and height that the model was trained for."""

NUM_INFERENCE_STEPS = 24
GUIDANCE_SCALE = 2.0
"""Scale of `ZImagePipeline`; the modular pipeline and exeunt count it from 1: 3.0 there."""

MAX_CAPTION_TOKENS = 64
"""Longest prompt seen in training, with the eight tokens of the chat template."""

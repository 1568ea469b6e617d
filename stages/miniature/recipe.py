"""What a caller of the miniature model needs to know: where it lies and how to run it."""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
IMAGE_SIZE_PX = 128
"""The only width and height that the model was trained for."""

NUM_INFERENCE_STEPS = 16
GUIDANCE_SCALE = 0.0
"""Scale of `ZImagePipeline`, where 0 means one forward pass a step and no guidance."""

MAX_CAPTION_TOKENS = 64
"""Longest prompt seen in training, with the eight tokens of the chat template."""

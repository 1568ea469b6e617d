"""The miniature model: a whole text-to-image model of a few megabytes, and how it was made."""

from stages.miniature.recipe import GUIDANCE_SCALE, IMAGE_SIZE_PX, MODEL_DIR, NUM_INFERENCE_STEPS

__all__ = ["GUIDANCE_SCALE", "IMAGE_SIZE_PX", "MODEL_DIR", "NUM_INFERENCE_STEPS"]

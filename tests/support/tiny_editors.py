"""Tiny models of the families that edit: those of `tiny_models` under another name."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch
import transformers

from tests.support import tiny_models

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def flux_kontext(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a FLUX.1 Kontext model of 0.8 MB: its parts are those of FLUX.1."""
    tiny_models.flux(directory, seed=seed, dtype=dtype)
    return _renamed(directory, "FluxKontextPipeline")


def sdxl_inpaint(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write an SDXL model whose UNet takes mask and masked picture beside the latents."""
    tiny_models.sdxl(directory, seed=seed, dtype=dtype)
    torch.manual_seed(seed)
    kind = diffusers.UNet2DConditionModel
    unet = kind.from_config({**kind.load_config(directory / "unet"), "in_channels": 9})
    unet.eval().to(dtype).save_pretrained(directory / "unet")
    return _renamed(directory, "StableDiffusionXLInpaintPipeline")


def qwen_image_edit(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    pipeline: str = "QwenImageEditPipeline",
) -> Path:
    """Write a Qwen-Image-Edit model of 2.5 MB, with the processor that reads its pictures.

    The processor takes torchvision, like that of the real model.
    """
    tiny_models.qwen_image(directory, seed=seed, dtype=dtype)
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(directory / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    tokenizer.save_pretrained(directory / "tokenizer")
    transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory / "processor")
    path = directory / "text_encoder" / "config.json"
    ids = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    return _renamed(directory, pipeline, processor=["transformers", "Qwen2VLProcessor"])


def _renamed(directory: Path, pipeline: str, **parts: list[str]) -> Path:
    path = directory / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": pipeline} | parts))
    return directory

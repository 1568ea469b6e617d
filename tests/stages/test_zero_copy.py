"""A stage maps its weights from their files; it does not copy them into memory of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from tests.support.tiny_models import z_image

LEAST_BYTES, MOST_ANONYMOUS_BYTES = 10**9, 100 * 10**6

LOAD = """
import sys
from pathlib import Path

import torch

from stages.components import bind, component_names
from stages.families import family_named
from stages.phases import split
from stages.execute import quiet_libraries

def memory():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}

phase, model_dir, small_dir, dtype = sys.argv[1:]
quiet_libraries()
graph, dtype = split(family_named("z-image"), "text-to-image"), getattr(torch, dtype)
first = bind(graph, phase, Path(small_dir), dtype=dtype, device="cpu")  # imports are paid here
before = memory()["Anonymous"]
pipe = bind(graph, phase, Path(model_dir), dtype=dtype, device="cpu")
grown = memory()["Anonymous"] - before
models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
print(grown, sum(tensor.nbytes for model in models for tensor in model.parameters()))
"""


def large_transformer() -> Any:
    return diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=2048,
        n_layers=9,
        n_refiner_layers=1,
        n_heads=16,
        n_kv_heads=16,
        cap_feat_dim=16,
        axes_dims=[32, 48, 48],
        axes_lens=[512, 32, 32],
    )


def large_text_encoder() -> Any:
    config = transformers.Qwen3Config(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=512,
    )
    return transformers.Qwen3Model(config)


LARGE = {
    "denoise": ("transformer", "diffusion_pytorch_model.safetensors", large_transformer),
    "encode": ("text_encoder", "model.safetensors", large_text_encoder),
}


def write_sparse(model: Any, path: Path) -> int:
    """A bfloat16 weight file of a model on `meta`: a header, and a hole; returns its bytes."""
    header, end = dict[str, Any](), 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 2 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def load(phase: str, model_dir: Path, small_dir: Path, dtype: str) -> tuple[int, int]:
    """The bytes of anonymous memory that a load in a new process costs, and those it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, phase, str(model_dir), str(small_dir), dtype],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    grown, loaded = done.stdout.split()
    return int(grown), int(loaded)


@pytest.mark.parametrize("phase", sorted(LARGE))
def test_a_gigabyte_of_weights_costs_no_memory_of_the_stages_own(
    phase: str, tmp_path: Path
) -> None:
    small = z_image(tmp_path / "small", dtype=torch.bfloat16)
    model_dir = z_image(tmp_path / "large", dtype=torch.bfloat16)
    component, name, build = LARGE[phase]
    with torch.device("meta"):
        model = build()
    model.to(torch.bfloat16)
    if phase == "denoise":
        model.save_config(model_dir / component)
    else:
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(model_dir / component)
    nbytes = write_sparse(model, model_dir / component / name)
    grown, loaded = load(phase, model_dir, small, "bfloat16")
    assert loaded == nbytes > LEAST_BYTES
    assert grown < MOST_ANONYMOUS_BYTES

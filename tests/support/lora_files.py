"""LoRA files for tiny models: random factors for some of a component's layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from stages.components import component_names, renew_job_state
from stages.families import Family
from stages.fingerprints import file_sha256
from stages.meta_models import built_on_meta
from stages.models import open_model

LAYERS = ("to_q", "to_v", "q_proj", "v_proj", "out_proj", "linear_1")
RANK = 2


def layers_of(model_dir: Path, component: str) -> dict[str, torch.nn.Module]:
    """The layers of a component that these files change."""
    module = built_on_meta(open_model(model_dir).components[component])
    found = {n: m for n, m in module.named_modules() if n.rpartition(".")[2] in LAYERS}
    assert found, f"{component} has none of {LAYERS}"
    return found


def factors(
    model_dir: Path, component: str, *, seed: int = 1, prefix: str | None = None, rank: int = RANK
) -> dict[str, torch.Tensor]:
    """Factors for a component, large enough to be seen, under names that diffusers saves."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, layer in layers_of(model_dir, component).items():
        weight: Any = layer.weight
        num_out, num_in = weight.shape
        down = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        up = torch.randn(num_out, rank, generator=generator)
        start = f"{component if prefix is None else prefix}.{name}"
        if component.startswith("text_encoder"):
            found[f"{start}.lora_linear_layer.down.weight"] = down
            found[f"{start}.lora_linear_layer.up.weight"] = up
        else:
            found[f"{start}.lora_A.weight"] = down
            found[f"{start}.lora_B.weight"] = up
    return found


def write_lora(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """A LoRA file of these tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
    return path


def digest(path: Path, where: Any) -> str:
    """The file's digest, as a request names it."""
    return file_sha256(path, Path(where.home_dir))


def whole_pipe(
    family: Family, model_dir: Path, dtype: torch.dtype, guidance: Mapping[str, float]
) -> Any:
    """The family's pipeline with all models, for `load_lora_weights`."""
    import diffusers

    kind = getattr(diffusers, family.pipeline)
    if family.encoded:
        pipe = kind.from_pretrained(model_dir, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe
    pipe = kind(pretrained_model_name_or_path=str(model_dir))
    own = {name: getattr(torch, text) for name, text in family.dtypes.items()}
    pipe.load_components(names=component_names(pipe), dtype={"default": dtype, **own})
    renew_job_state(pipe, guidance)
    return pipe


def run_pipe(
    pipe: Any, family: Family, options: Mapping[str, Any], guidance: Mapping[str, float]
) -> Any:
    """What a whole pipeline makes of a job with seed 7: modular ones take guidance by guiders."""
    generator = torch.Generator("cpu").manual_seed(7)
    if not family.encoded:
        return pipe(**options, generator=generator, output=list(family.products))
    scales = {family.guidance[guider]: scale for guider, scale in guidance.items()}
    made = pipe(**options, **scales, generator=generator, return_dict=False)[0]
    return {family.output: made}

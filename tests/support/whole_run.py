"""What stages are compared with: one pipeline in one process, and what each phase loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.components import bind, component_names, renew_job_state
from stages.families import Family
from stages.phases import Graph


def run_whole(
    family: Family,
    model_dir: Path,
    options: dict[str, Any],
    *,
    seed: int,
    dtype: torch.dtype,
    guidance: dict[str, float],
    output: str | list[str] | None = None,
    device: str = "cpu",
) -> Any:
    """What the family's modular pipeline makes of a job when it runs unsplit.

    Args:
        output: The value to give; a list gives a mapping of several.
    """
    import diffusers

    pipeline_class = getattr(diffusers, family.pipeline)
    if family.encoded:
        made = run_classic(
            family, model_dir, options, seed=seed, dtype=dtype, guidance=guidance, device=device
        )
        return {family.output: made} if isinstance(output, list) else made
    pipe = pipeline_class(pretrained_model_name_or_path=str(model_dir))
    own = {name: getattr(torch, text) for name, text in family.dtypes.items()}
    pipe.load_components(names=component_names(pipe), dtype={"default": dtype, **own})
    pipe.to(device)
    renew_job_state(pipe, guidance)
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipe(**options, generator=generator, output=output or family.output)


def run_classic(
    family: Family,
    model_dir: Path,
    options: dict[str, Any],
    *,
    seed: int,
    dtype: torch.dtype,
    guidance: dict[str, float],
    device: str = "cpu",
) -> Any:
    """What a classic pipeline makes of a job in one call."""
    import diffusers

    pipe = getattr(diffusers, family.pipeline).from_pretrained(model_dir, dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    scales = {family.guidance[guider]: scale for guider, scale in guidance.items()}
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipe(**options, **scales, generator=generator, return_dict=False)[0]


def loaded_by_phase(graph: Graph, model_dir: Path) -> dict[str, set[str]]:
    """The components that each phase loads with their weights."""
    return {
        phase: {
            name
            for name, part in bind(
                graph, phase, model_dir, dtype=torch.float32, device="cpu"
            ).components.items()
            if isinstance(part, torch.nn.Module) and not next(part.parameters()).is_meta
        }
        for phase in graph.phases
    }

"""The denoisers of all families are mapped from their files: a gigabyte or more of each.

They are as wide as their default, with fewer layers. What a model computes itself when it is
made, such as a table of positions, is no weight: it is not counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch

from tests.stages.test_zero_copy import LEAST_BYTES, MOST_ANONYMOUS_BYTES, write_sparse
from tests.support.tiny_families import CASES
from tests.support.video_cases import VIDEO_CASES

LOAD = """
import ctypes
import json
import sys
from pathlib import Path

import torch

from stages.components import bind
from stages.execute import quiet_libraries
from stages.families import family_named
from stages.phases import split

def anonymous():
    ctypes.CDLL(None).malloc_trim(0)  # what is free already does not count
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}["Anonymous"]

quiet_libraries()
for name, task, *folders in json.load(sys.stdin):
    graph = split(family_named(name), task)
    for folder in folders:  # the small model pays for the imports
        before = anonymous()
        pipe = bind(graph, "denoise", Path(folder), dtype=torch.bfloat16, device="cpu")
        grown = anonymous() - before
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    grown -= sum(tensor.nbytes for model in models for tensor in model.buffers())
    print(name, grown, sum(tensor.nbytes for model in models for tensor in model.parameters()))
"""

WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 15}
FEWER_LAYERS = {  # of models of which a gigabyte is a small part
    "FluxTransformer2DModel": {"num_layers": 2, "num_single_layers": 4},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "HunyuanVideo15Transformer3DModel": {"num_layers": 6},
    "LTX2VideoTransformer3DModel": {"num_layers": 2},
    "QwenImageTransformer2DModel": {"num_layers": 2},
    "WanTransformer3DModel": WAN,  # the smaller of its two sizes
    "WanVACETransformer3DModel": WAN | {"vace_layers": [0, 5, 10]},
    "ZImageTransformer2DModel": {"n_layers": 4},
}


def with_large_denoiser(folder: Path, components: set[str]) -> None:
    """Replace the denoisers of a tiny model by large ones in sparse files."""
    index = json.loads((folder / "model_index.json").read_text())
    for component in components:
        class_name = index[component][1]
        with torch.device("meta"):
            model = getattr(diffusers, class_name)(**FEWER_LAYERS.get(class_name, {}))
        shutil.rmtree(folder / component)
        (folder / component).mkdir()
        model.to(torch.bfloat16).save_config(folder / component)
        write_sparse(model, folder / component / "diffusion_pytorch_model.safetensors")


def test_the_denoiser_of_every_family_costs_no_memory_of_the_stages_own(tmp_path: Path) -> None:
    asked: list[tuple[str, str, str, str]] = []
    seen = set[str]()
    for case in [*CASES.values(), *VIDEO_CASES.values()]:
        if case.family.pipeline in seen:  # the same classes as another one's
            continue
        seen.add(case.family.pipeline)
        small: Any = case.build(tmp_path / case.name / "small")
        large = Path(shutil.copytree(small, tmp_path / case.name / "large"))
        with_large_denoiser(large, case.loads["denoise"])
        task = getattr(case, "task", "text-to-image")
        asked.append((case.name, task, str(small), str(large)))
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = {name: (int(g), int(n)) for name, g, n in map(str.split, done.stdout.splitlines())}
    assert set(found) == {name for name, *_ in asked}
    assert not {name: found[name] for name in found if found[name][0] >= MOST_ANONYMOUS_BYTES}
    assert min(loaded for _, loaded in found.values()) > LEAST_BYTES

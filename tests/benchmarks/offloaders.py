"""Offloaders by name: what `tests.benchmarks.offload_bench` compares.

Each takes a directory of weights, the model's class, and the GiB of device memory that are free,
and returns a module that is ready for CUDA inputs. Those of other packages are set up as their
documentation says for a card of that size; a package that is not installed is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ddo

GIB = 1 << 30
RESERVE = "1.5GiB"  # what we begin with for activations and workspaces of a 4096-token step
PEER_RESERVE_GIB = 3.0  # peers take a budget for weights alone
sessions: list[ddo.Session] = []
"""Ours, as they were made; a session ends with its process."""

Offloader = Callable[[Path, Any, float], Any]


def resident(directory: Path, model_class: Any, cap_gib: float) -> Any:
    """Everything on the device: the reference."""
    return _load(directory, model_class).to("cuda")


def ours(preset: str, **options: Any) -> Offloader:
    """A preset of this package."""

    def offload(directory: Path, model_class: Any, cap_gib: float) -> Any:
        settings = ddo.OffloadSettings(
            preset=preset,  # type: ignore[arg-type]
            device_budget=f"{cap_gib:g}GiB",
            reserve=RESERVE,
            **options,
        )
        sessions.append(ddo.load(model_class, directory, settings, device="cuda"))
        return sessions[-1].module

    return offload


def group(directory: Path, model_class: Any, cap_gib: float) -> Any:
    """diffusers' own group offload, one leaf ahead on a stream of its own."""
    from diffusers.hooks import apply_group_offloading

    module = _load(directory, model_class)
    apply_group_offloading(
        module,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=True,
        record_stream=True,
    )
    return module


def flextensor(directory: Path, model_class: Any, cap_gib: float) -> Any:
    """FlexTensor, for the blocks; what is around them stays on the device."""
    import flextensor as peer

    module = _load(directory, model_class)
    blocks = [n for n, child in module.named_children() if isinstance(child, torch.nn.ModuleList)]
    for name, child in module.named_children():
        if name not in blocks:
            child.to("cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    config = peer.OffloadConfig(
        include_patterns=[f"{name}.*" for name in blocks],
        max_gpu_mem_fraction=(cap_gib - 1.0) * GIB / total,
    )
    return peer.offload(module, config=config)


def ddo_vmm(directory: Path, model_class: Any, cap_gib: float) -> Any:
    """diffusers-dynamic-offloader, its VMM route with a source cache in host memory."""
    import diffusers_dynamic_offloader as peer

    config = peer.resolve_dynamic_offload_backend("vmm", "auto").build_config(
        vmm_resident_weight_budget_gb=cap_gib - PEER_RESERVE_GIB,
        vmm_native_transport=True,
        vmm_staging_buffer_gb=1.0,
        vmm_source_cache_gb=28.0,
        vmm_source_registered_gb=28.0,
    )
    loaded = peer.from_pretrained_with_dynamic_offload(
        str(directory),
        model_loader=model_class,
        torch_dtype=torch.bfloat16,
        dynamic_offload_config=config,
    )
    return peer.enable_offload(loaded.module, config=config, component="transformer").module


def prepare_process(name: str) -> None:
    """What has to be done before CUDA is initialised: one peer replaces torch's allocator."""
    if name != "ddo_vmm":
        return
    import os

    import ddo_vmm_allocator
    from ddo_vmm_allocator.torch_allocator import install_pytorch_vmm_allocator

    library = Path(ddo_vmm_allocator.__file__).parent / "native/linux/libddo_vmm.so"
    os.environ["DDO_VMM_LIBRARY_PATH"] = str(library)
    os.environ["DDO_VMM_TORCH_CACHE_MIB"] = "512"
    os.environ["DDO_VMM_FAST_CHILD"] = "1"
    install_pytorch_vmm_allocator()


def offloader(name: str, host_gib: float | None = None) -> Offloader:
    """The offloader of a name.

    Args:
        host_gib: Pinned host memory that ours may use; None takes the default.
    """
    options = {} if host_gib is None else {"host_budget": max(1, int(host_gib * GIB))}
    found: dict[str, Offloader] = {
        "resident": resident,
        "auto": ours("auto", **options),
        "stream": ours("stream", **options),
        "low_memory": ours("low_memory", **options),
        "group": group,
        "flextensor": flextensor,
        "ddo_vmm": ddo_vmm,
    }
    return found[name]


NAMES = ("resident", "auto", "stream", "low_memory", "group", "flextensor", "ddo_vmm")
PACKAGES = {"flextensor": "flextensor", "ddo_vmm": "ddo_vmm_allocator"}


def _load(directory: Path, model_class: Any) -> Any:
    return model_class.from_pretrained(directory, torch_dtype=torch.bfloat16).eval()

"""LoRA adapters of a loaded pipeline: put on for one request, taken off for the next.

The libraries' own loaders rename, convert and add them. What a pipeline wears depends on the
request alone, never on what it wore before: all is taken off, then all is put on, in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from stages.contracts import AdapterUse, StageContext
from stages.errors import ModelError, RequestError
from stages.families import Family
from stages.fingerprints import file_sha256

DENOISER = "transformer"


def lora_loader(family: Family) -> Any:
    """The class of diffusers that reads and adds LoRA files for a family; None where it has none.

    It is a part of the family's pipeline class, and knows the pipeline's models by their names.
    """
    import diffusers
    from diffusers.loaders.lora_base import LoraBaseMixin

    bases: tuple[type[Any], ...] = getattr(diffusers, family.pipeline).__mro__
    pipelines = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
    for base in bases:
        if issubclass(base, LoraBaseMixin) and not issubclass(base, pipelines):
            return base if base is not LoraBaseMixin else None
    return None


def loadable_modules(loader: Any) -> tuple[str, ...]:
    """Names of the models that a loader adds LoRA to."""
    return tuple(loader._lora_loadable_modules)


def adapter_file(use: AdapterUse, context: StageContext) -> Path:
    """The file of an adapter, as it was when the request was made.

    Raises:
        ModelError: It is gone or has changed since.
    """
    path = Path(context.adapters.get(use.digest, ""))
    if use.digest not in context.adapters:
        raise ModelError(f"no path is known of the LoRA file with digest {use.digest[:16]}")
    found = file_sha256(path, Path(context.home_dir))
    if found != use.digest:
        raise ModelError(
            f"LoRA file {path} changed while the run was under way: its digest was "
            f"{use.digest[:16]} and is {found[:16]}; start the run again"
        )
    return path


class LoraState:
    """What a LoRA file holds, under the names of the model that wears it.

    Attributes:
        tensors: By the component's name, a dot, and the name in it.
        alphas: Scales by layer, where the file has them apart.
        metadata: How it was trained, where the file tells.
    """

    def __init__(self, loader: Any, path: Path, unet_config: Any = None) -> None:
        self.tensors: dict[str, torch.Tensor]
        try:
            self.tensors, *alphas, self.metadata = loader.lora_state_dict(
                str(path.parent),
                weight_name=path.name,
                use_safetensors=True,
                local_files_only=True,
                return_lora_metadata=True,
                return_alphas=True,  # of those loaders that keep them apart
                unet_config=unet_config,
            )
        except (ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise RequestError(
                f"diffusers' {loader.__name__} cannot read the LoRA file {path}: "
                f"{type(error).__name__}: {error}; it may be of another family"
            ) from error
        self.alphas: dict[str, Any] | None = alphas[0] if alphas else None

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors of one component, by their names in it."""
        start = f"{prefix}."
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


def prefixes(use: AdapterUse, loadable: Iterable[str]) -> dict[str, str]:
    """Component -> the prefix that its tensors have in the file.

    Files know of one transformer; where a model has two, the named one takes what is meant for it.
    """
    if use.target:
        return {use.target: DENOISER if use.target.startswith(DENOISER) else use.target}
    return {name: name for name in loadable}


class Worn:
    """The adapters that a pipeline's models wear.

    Attributes:
        uses: In their order; None after a change that failed, when nobody knows.
    """

    def __init__(self) -> None:
        self.uses: tuple[AdapterUse, ...] | None = ()

    def change(
        self, pipe: Any, family: Family, uses: tuple[AdapterUse, ...], context: StageContext
    ) -> None:
        """Let a loaded pipeline's models wear these adapters and no others.

        Raises:
            ModelError: A file has changed, or does not fit.
        """
        paths = [adapter_file(use, context) for use in uses]
        if self.uses == uses:
            return
        wearer = _wearer(pipe, family)
        if self.uses != ():
            self.uses = None
            wearer.unload_lora_weights()
        if uses:
            self.uses = None
            names = [f"lora_{n}" for n in range(len(uses))]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                for name, use, path in zip(names, uses, paths, strict=True):
                    _put_on(wearer, name, use, path, getattr(pipe, "unet", None))
            wearer.set_adapters(names, [use.scale for use in uses])
        self.uses = uses


def _wearer(pipe: Any, family: Family) -> Any:
    """The family's loader with the models that this pipeline has, and no stand-ins."""
    loader = lora_loader(family)
    wearer = loader.__new__(loader)
    for name in loadable_modules(loader):
        setattr(wearer, name, pipe.components.get(name))
    return wearer


def _put_on(wearer: Any, name: str, use: AdapterUse, path: Path, unet: Any) -> None:
    state = LoraState(type(wearer), path, getattr(unet, "config", None))
    for component, prefix in prefixes(use, loadable_modules(wearer)).items():
        model = getattr(wearer, component)
        if model is None or not state.named(prefix):
            continue
        told = {
            "network_alphas": state.alphas,
            "metadata": state.metadata,
            "adapter_name": name,
            "low_cpu_mem_usage": True,
        }
        if hasattr(model, "load_lora_adapter"):  # a model of diffusers
            model.load_lora_adapter(dict(state.tensors), prefix=prefix, **told)
        else:
            wearer.load_lora_into_text_encoder(
                dict(state.tensors), text_encoder=model, prefix=prefix, **told
            )
        model.requires_grad_(False)

"""`Run`: one flow run's model, store and device, and the phases that run on them.

A flow reads as the phases in their order, each a `with` block. Inside it, calling the phase
makes a request out of the visible arguments and runs it as a Prefect task; leaving the block
retires the phase's process, and its memory is back.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from flows.batch.scope import current_scope
from flows.display import Display, current_display
from flows.launch import shared_launcher
from flows.phase import Phase
from flows.reports.journal import Journal, JournalDisplay
from flows.settings import RunSettings
from stages.artifacts import open_store
from stages.block_inputs import inputs_of_phase
from stages.contracts import (
    AdapterUse,
    ArtifactRef,
    OffloadChoice,
    StageContext,
    StageName,
    StageRequest,
    StageResult,
)
from stages.errors import RequestError
from stages.fingerprints import file_sha256
from stages.lora_files import Lora
from stages.manifest import ADAPTER_ROLE, AdapterFacts, Manifest
from stages.media import Settings
from stages.models import ModelDirectory
from stages.quantized import quantizer_versions
from stages.safetensors_header import read_header
from stages.tokens import truncation_sentence
from stages.versions import CODE_VERSIONS, adapter_library_versions, defining_versions


class Run:
    """A flow run on one model; all its requests are made here.

    Args:
        family: Name of the family's declaration.
        task: The family's task.
        model: The model directory, opened and checked.
        model_name: For people and picture settings.
        dtype: Compute dtype by torch name.
        device: `cpu`, `cuda` or `cuda:N`.
        fresh: Compute every stage anew, whatever the store holds, from files read anew.
        on_truncate: Whether a prompt longer than its encoder reads is an error.
        offload: How models share a GPU with the work; no part of any request.
        loras: LoRA files that the models wear, in order.
        blocks: Digest of reviewed custom blocks, by the name of the block in whose place they run.
        block_inputs: What they are given besides, by name.
        may_tile: Whether a decode that ran out of memory is done again in tiles.
        timeout_s: Longest time for one request; None waits for ever.
    """

    def __init__(
        self,
        *,
        family: str,
        task: str,
        model: ModelDirectory,
        model_name: str,
        dtype: str,
        device: str,
        fresh: bool = False,
        on_truncate: str = "warn",
        offload: OffloadChoice | None = None,
        loras: Sequence[Lora] = (),
        blocks: Mapping[str, str] | None = None,
        block_inputs: Mapping[str, JsonValue] | None = None,
        may_tile: bool = True,
        timeout_s: float | None = None,
        run_id: str = "",
    ) -> None:
        self.family, self.task, self.model, self.dtype = family, task, model, dtype
        self.settings = settings = RunSettings.from_env()
        self.model_name = model_name
        self.fresh, self.timeout_s, self.may_tile = fresh, timeout_s, may_tile
        self.store = open_store(settings.store_url)
        self.loras, self.blocks = tuple(loras), dict(blocks or {})
        self.block_inputs = dict(block_inputs or {})
        self._worn = tuple(self._use(lora) for lora in loras)
        self.context = StageContext.model_validate(
            {
                "model_dir": str(model.directory),
                "store_url": settings.store_url,
                "home_dir": str(settings.home.root),
                "sources": {name: str(path) for name, path in model.sources.items()},
                "adapters": {
                    use.digest: str(lora.path)
                    for use, lora in zip(self._worn, self.loras, strict=True)
                },
                "device": device,
                "on_truncate": on_truncate,
                "offload": offload or OffloadChoice(),
                "checkpoint_every_steps": settings.checkpoint_every_steps,
                "checkpoint_every_s": settings.checkpoint_every_s,
                "preview_every_steps": settings.preview_every_steps,
                "preview_dir": str(settings.home.reports / (run_id or "unnamed") / "previews"),
                "run_id": run_id,
            }
        )
        display = current_display()
        self.reports_folder = settings.home.reports / (run_id or "unnamed")
        self.journal = Journal(self.reports_folder, self._header(), display.warn)
        self.display: Display = JournalDisplay(display, self.journal)
        self._num_reports = len(list(self.reports_folder.glob("*.json")))  # of an earlier attempt
        self._verified: set[str] = set()
        shared_launcher(settings.launch).expect(family)

    def _header(self) -> dict[str, Any]:
        return {
            "run_id": self.context.run_id,
            "family": self.family,
            "task": self.task,
            "model": self.model_name,
            "dtype": self.dtype,
            "device": self.context.device,
            "offload": self.context.offload.preset,
            "sources": {name: str(path) for name, path in self.model.sources.items()},
            "lora": {lora.name: lora.scale for lora in self.loras},
            "blocks": self.blocks,
            "fresh": self.fresh,
            "host": platform.node(),
            "store": self.store.url,
            "exeunt": metadata.version("exeunt"),
            "libraries": defining_versions(),
        }

    @contextmanager
    def phase(self, stage: StageName, num_requests: int = 1) -> Iterator[Phase]:
        """A phase of this run; its process starts at the first request that has no result.

        In a batch, the phase and its process are shared by the rows.
        """
        if (scope := current_scope()) is not None and stage != "inspect":
            yield scope.phase(self, stage)
            return
        phase = Phase(self, stage)
        self.display.phase_begins(stage, num_requests)
        try:
            yield phase
        finally:
            phase.retire()
            self.display.phase_ends(stage)

    @property
    def manifest(self) -> Manifest:
        """What the model's phases load and take; computed once a model, then found."""
        return self._inspected[0]

    @cached_property
    def _inspected(self) -> tuple[Manifest, tuple[frozenset[str], ...]]:
        """The model's manifest, and for each LoRA file the components that it changes.

        Raises:
            StageError: The model is not whole, or a file does not fit it.
        """
        with self.phase("inspect", 1 + len(self.loras)) as inspect:
            manifest = inspect(label=self.model_name).artifacts["manifest"]
            changed = [
                inspect.answer(self._question(use, lora.name)).artifacts[ADAPTER_ROLE]
                for use, lora in zip(self._worn, self.loras, strict=True)
            ]
        facts = [AdapterFacts.model_validate_json(self.store.read(ref)) for ref in changed]
        return (
            Manifest.model_validate_json(self.store.read(manifest)),
            tuple(frozenset(each.components) for each in facts),
        )

    def _question(self, use: AdapterUse, label: str) -> StageRequest:
        """What `inspect` is asked of a LoRA file; neither its scale nor any weights matter."""
        asked = self.request("inspect", (), seed=None, label=label, options={})
        return asked.model_copy(
            update={
                "adapters": (use.model_copy(update={"scale": 1.0}),),
                "components": {},
                "libraries": defining_versions() | adapter_library_versions(),
            }
        )

    def _use(self, lora: Lora) -> AdapterUse:
        digest = file_sha256(lora.path, self.settings.home.root, verify=self.fresh)
        return AdapterUse(digest=digest, scale=lora.scale, target=lora.target)

    def request(
        self,
        stage: StageName,
        inputs: tuple[StageResult, ...],
        *,
        seed: int | None,
        label: str,
        options: Mapping[str, Any],
    ) -> StageRequest:
        """The request that says all that determines this stage's output."""
        parts = self.model.components
        configs = {name: part.config_digest for name, part in parts.items()}
        configs["model_index"] = self.model.index_digest
        components: dict[str, str] = {}
        adapters: tuple[AdapterUse, ...] = ()
        task = self.task
        if stage == "inspect":  # it reads no weights, only what their headers promise
            components = {name: part.header_digest for name, part in parts.items()}
        else:
            facts = self.manifest.phases[stage]
            task = facts.task or task  # a phase that tasks have in common has one result for all
            names = facts.components
            components = {name: self._fingerprint(name) for name in names}
            worn = zip(self._worn, self._inspected[1], strict=True)
            adapters = tuple(use for use, changed in worn if changed & set(names))
            if self.block_inputs:
                own = inputs_of_phase(self.block_inputs, self.manifest, stage, options)
                options = {**options, **own}
        return StageRequest(
            stage=stage,
            code_version=CODE_VERSIONS[stage],
            family=self.family,
            task=task,
            libraries=self._libraries(components, adapters),
            components=components,
            configs=configs,
            inputs=_roles(inputs),
            dtype=self.dtype,
            options={name: value for name, value in options.items() if value is not None},
            adapters=adapters,
            blocks=self.blocks,
            seed=seed,
            label=label,
        )

    def _libraries(
        self, components: Mapping[str, str], adapters: tuple[AdapterUse, ...]
    ) -> dict[str, str]:
        """Versions of what computes with these components and adapters."""
        parts = self.model.components
        methods = {parts[name].quant_method or "" for name in components if name in parts}
        added = adapter_library_versions() if adapters else {}
        return {**defining_versions(), **quantizer_versions(methods), **added}

    def tell_truncation(self, embeds: StageResult) -> None:
        """Tell of a prompt that was longer than its encoder reads, out of the found artifact.

        Raises:
            RequestError: `on_truncate` is `error`, and there is one.
        """
        ref = next(iter(embeds.artifacts.values()))
        document = json.loads(read_header(self.store.path(ref)).metadata["exeunt"])
        facts = document["facts"]
        for use in facts.get("tokens", []):
            if use["tokens_total"] <= use["tokens_used"]:
                continue
            sentence = truncation_sentence(use)
            if self.context.on_truncate == "error":
                raise RequestError(f"{sentence}; shorten it, or allow it with --on-truncate warn")
            self.display.warn(sentence)

    def model_hashes(self) -> dict[str, str]:
        """Full fingerprint of each component that has files, of LoRA files and custom blocks."""
        found = {name: self._fingerprint(name) for name in self.model.components}
        worn = zip(self.loras, self._worn, strict=True)
        found |= {f"lora {lora.name}": use.digest for lora, use in worn}
        return found | {f"blocks {name}": digest for name, digest in self.blocks.items()}

    def _fingerprint(self, name: str) -> str:
        """A component's fingerprint; a fresh run reads its files once, seemingly unchanged or not.

        What a disk or a network hides of a change shows in the content alone.
        """
        verify = self.fresh and name not in self._verified
        found = self.model.components[name].fingerprint(self.settings.home.root, verify=verify)
        self._verified.add(name)
        return found

    def keep_item(self, path: Path, ref: ArtifactRef, settings: Settings, media_type: str) -> None:
        """Note a saved file and how it was made in the run's journal."""
        self.journal.write(
            "item",
            path=str(path),
            digest=ref.digest,
            media_type=media_type,
            settings=json.loads(settings.as_json()),
            parameters=settings.as_parameters(),
        )

    def keep_report(self, request: StageRequest, report: dict[str, Any]) -> None:
        """Write a stage's report where `exeunt report` finds it; a disk that cannot is no error."""
        folder = self.reports_folder
        self._num_reports += 1
        path = folder / f"{self._num_reports:05d}-{request.stage}.json"
        partial = path.with_suffix(".partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(report, indent=1))
            partial.replace(path)
        except OSError as error:  # the result is there, and worth more than its report
            self.display.warn(
                f"the report of {request.stage} is not kept: {error}; "
                f"see that {folder} can be written"
            )


def open_run(**arguments: Any) -> Run:
    """A run; in a batch, the one that rows with equal arguments share. See `Run`."""
    scope = current_scope()
    return Run(**arguments) if scope is None else scope.run(arguments, Run)


def _roles(inputs: tuple[StageResult, ...]) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for result in inputs:
        for role, ref in result.artifacts.items():
            if role in roles:
                raise RequestError(f"two inputs of one request are both called {role!r}")
            roles[role] = ref
    return roles

"""Where a phase's models compute: mapped on the CPU, moved to the device, or streamed to it.

Streaming is `ddo`'s: one session a model, for as long as the process keeps its pipeline.
Weights, the ring, and what torch allocates while a request runs share one limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stages.contracts import OffloadChoice
from stages.errors import DependencyError, ModelError, RequestError, StageFailed
from stages.models import Component

if TYPE_CHECKING:
    from ddo import OffloadSettings, Session
    from ddo.attaching import OpenedDevice

# What a small model beside a large one may need above its weights: alignment and driver pages.
_SLACK = 64 << 20
_EASE = 4  # times the weights' size; a session would have nothing to do


@dataclass(frozen=True, slots=True)
class _Attached:
    opened: OpenedDevice
    session: Session


class Placement:
    """The models of one pipeline, and where they compute.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
    """

    def __init__(self, device: str, choice: OffloadChoice) -> None:
        self.device, self.choice = device, choice
        self._attached: dict[str, _Attached] = {}
        self._main = ""  # the largest model: torch's memory comes out of its share
        self._listed: set[str] = set()
        self._is_moved = False

    def place(self, pipe: Any, parts: Mapping[str, Component]) -> None:
        """Let every model of a loaded pipeline compute on the device.

        Args:
            parts: The model directory's components, whose files hold the weights.

        Raises:
            RequestError: No plan fits the budgets; the message says what would.
            DependencyError: The device is not usable.
            torch.OutOfMemoryError: The device is fuller than the budget says.
        """
        if is_computed_in_place(self.device):
            return
        models = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
        if not models:
            return
        self._is_moved = self.choice.preset == "off" or self._fits_with_ease(models)
        if self._is_moved:
            pipe.to(self.device)
            return
        try:
            self._attach(models, parts)
        except BaseException:
            self.detach()
            raise
        _tell_device(pipe, self._attached[self._main].opened.backend.device)

    def memory(self) -> AbstractContextManager[None]:
        """A context in which torch allocates below the limit that the weights are under."""
        if not self._attached:
            return nullcontext()
        return self._attached[self._main].opened.memory()

    def detach(self) -> None:
        """Give the device back; the models are as they were loaded. Twice is once."""
        self._main = ""
        while self._attached:
            _, attached = self._attached.popitem()
            attached.session.detach()

    def report(self) -> dict[str, Any]:
        """What every session planned and did since the process began, as JSON values.

        The plan's blocks are listed in a process's first report only.
        """
        found: dict[str, Any] = {}
        for name, attached in self._attached.items():
            report = attached.session.report().to_json()
            blocks = report["plan"]["blocks"]
            if name in self._listed:
                report["plan"] = {k: v for k, v in report["plan"].items() if k != "blocks"}
            report["plan"]["num_blocks"] = len(blocks)
            self._listed.add(name)
            found[name] = report
        chosen = self.choice.model_dump(exclude_none=True)
        told = {**chosen, "device": self.device, "components": found}
        if self._is_moved and self.choice.preset != "off":
            told["note"] = "the weights take so little of the device that they were moved there"
        return told

    def _fits_with_ease(self, models: Mapping[str, nn.Module]) -> bool:
        """Whether nobody set a budget, and there is memory for weights and work many times over."""
        if self.choice.preset != "auto" or self.choice.device_budget is not None:
            return False
        if not self.device.startswith("cuda"):
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        return _EASE * sum(_nbytes(model) for model in models.values()) <= free

    def _attach(self, models: dict[str, nn.Module], parts: Mapping[str, Component]) -> None:
        sizes = {name: _nbytes(model) for name, model in models.items()}
        main = max(sizes, key=lambda name: sizes[name])
        for name in sorted(models, key=lambda name: name != main):
            with _told_as_stage_errors(name):
                settings = _settings(self.choice, name, main, sizes, self.device)
                opened = open_device(self.device, settings)
                self._attach_one(name, models[name], settings, opened, parts.get(name))

    def _attach_one(
        self,
        name: str,
        model: nn.Module,
        settings: OffloadSettings,
        opened: OpenedDevice,
        part: Component | None,
    ) -> None:
        from ddo import OffloadSession, attach
        from ddo.weight_files import read_weight_files

        files = None
        if part is not None and part.weights is not None and part.single_file is None:
            files = read_weight_files(part.directory, part.variant)
        # One scope a device: buffers of the smaller models come out of the largest one's share.
        with self.memory() if self._attached else opened.memory():
            session = attach(model, settings, files, backend=opened.backend)
        self._main = self._main or name
        self._attached[name] = _Attached(opened, session)
        if opened.fallback_reason is not None and isinstance(session, OffloadSession):
            session.note("native", opened.fallback_reason)


def is_computed_in_place(device: str) -> bool:
    """Whether models compute where their weights are mapped, so that nothing moves."""
    return device == "cpu"


def open_device(device: str, settings: OffloadSettings) -> OpenedDevice:
    """What weights are streamed to, under the budgets of these settings."""
    from ddo.attaching import open_device as open_with_ddo

    return open_with_ddo(device, settings)


def _settings(
    choice: OffloadChoice, name: str, main: str, sizes: Mapping[str, int], device: str
) -> OffloadSettings:
    """A model's settings: the smaller ones get their weights' size, the largest one the rest."""
    from ddo import OffloadSettings

    said = choice.model_dump()
    if len(sizes) == 1:
        return OffloadSettings(**said)
    total = choice.device_budget
    if total is None and device != "cpu":
        total, _ = torch.cuda.mem_get_info(device)
    if total is None:
        return OffloadSettings(**said)
    whole = sum(sizes.values())
    shares = {
        each: min(nbytes + _SLACK, total * nbytes // whole)
        for each, nbytes in sizes.items()
        if each != main
    }
    if name != main:
        rounding = max(1, min(shares[name] // 8, _SLACK // 2))  # pages are not filled to the end
        said |= {"device_budget": max(2, shares[name]), "reserve": rounding}
        return OffloadSettings(**said)
    return OffloadSettings(**said | {"device_budget": total - sum(shares.values())})


def _nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _tell_device(pipe: Any, device: torch.device) -> None:
    """Answer for the pipeline where it computes.

    By itself it asks the first weight, which is in host memory while it does not compute.
    """
    kind = type(pipe)
    where = property(lambda _: device)
    pipe.__class__ = type(kind.__name__, (kind,), {"device": where, "_execution_device": where})


@contextmanager
def _told_as_stage_errors(name: str) -> Iterator[None]:
    from ddo import DdoError
    from ddo.planning import PlanError
    from ddo.settings import SettingsError
    from ddo.torch_backend import DeviceError
    from ddo.weight_files import SourceError

    try:
        yield
    except (PlanError, SettingsError) as error:
        raise RequestError(f"component {name!r} cannot be offloaded so: {error}") from error
    except SourceError as error:
        raise ModelError(f"component {name!r}: {error}") from error
    except DeviceError as error:
        raise DependencyError(f"component {name!r}: {error}") from error
    except DdoError as error:
        raise StageFailed(f"component {name!r} cannot be offloaded: {error}") from error

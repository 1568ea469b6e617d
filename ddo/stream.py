"""Puts a plan into effect: resident memory, the ring, and which memory each weight is bound to.

A streamed weight is bound to its place in the ring while its layer runs and to the data that was
found otherwise. So code that reads a weight from elsewhere never sees another block's bytes: it
gets the right values on the CPU, and an error about devices on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import RLock

import torch
from torch import Tensor

from ddo.blocks import Block
from ddo.errors import DdoError
from ddo.metrics import Metrics
from ddo.pin_counters import PinCounters
from ddo.planning import OffloadPlan
from ddo.profile import Recorder
from ddo.residents import Residents
from ddo.sizes import show_nbytes
from ddo.transfer import Backend, Ring, RingBlock, RingCounters


class GradientError(DdoError, RuntimeError):
    """A streamed weight would be kept for a backward pass, by which time others lie there."""


class WeightChanged(DdoError, RuntimeError):
    """A streamed weight was given other data after the session had looked at it."""


class Streamer:
    """Holds the device memory of a session. Thread-safe."""

    def __init__(self, backend: Backend, blocks: Sequence[Block], metrics: Metrics) -> None:
        self.recorder: Recorder | None = None
        self._backend = backend
        self._blocks = list(blocks)
        self._metrics = metrics
        self._lock = RLock()
        self._residents = Residents(backend, blocks, metrics)
        self._ring: Ring | None = None
        self._ring_numbers: dict[int, int] = {}  # of a block in the ring
        self._views: dict[int, list[Tensor]] = {}  # of streamed weights at their places
        self._bound: dict[int, Tensor] = {}  # memory of streamed blocks in use

    @property
    def counters(self) -> RingCounters | None:
        return self._ring.counters if self._ring is not None else None

    @property
    def streamed(self) -> Mapping[int, int]:
        """Numbers of the blocks that stream, with their numbers in the ring."""
        return self._ring_numbers

    def expect(self, plan: OffloadPlan) -> None:
        """Take what a plan with the same placement says of the step boundary."""
        with self._lock:
            if self._ring is not None:
                self._ring.num_ahead = plan.num_ahead

    def copied_bytes(self) -> int:
        """Bytes that all rings have copied."""
        now = self._ring.counters.copied_bytes if self._ring is not None else 0
        return self._metrics.retired.copied_bytes + now

    def apply(self, plan: OffloadPlan, order: Sequence[int]) -> None:
        """Make the device hold what the plan says. Waits for everything that is pending.

        Args:
            order: Streamed blocks in the order of use, repetitions included.

        Raises:
            torch.OutOfMemoryError: The device has not enough memory; nothing is held then.
        """
        with self._lock:
            numbers = {block.name: i for i, block in enumerate(self._blocks)}
            resident = [numbers[b.name] for b in plan.blocks if b.placement == "device"]
            places = {
                numbers[b.name]: b.ring_offset
                for b in plan.blocks
                if b.placement == "ring" and b.ring_offset is not None
            }
            self._drop_ring()
            self._residents.keep(set(resident))
            try:
                with torch.inference_mode(False):
                    there = self._residents.numbers
                    self._pin_and_upload(list(places), [n for n in resident if n not in there])
                    with self._metrics.setup.phase("make_ring"):
                        self._make_ring(plan, places, order)
                    with self._metrics.setup.phase("first_fill"):
                        self._residents.bind()
            except BaseException:
                self.clear()
                raise

    def clear(self) -> None:
        """Give all device memory back; every weight is bound to what was found."""
        with self._lock:
            self._drop_ring()
            self._residents.keep(set())

    def use(self, number: int) -> None:
        """A layer begins: bind its streamed block's weights to the device."""
        block = self._blocks[number]
        if torch.is_grad_enabled() and any(m.requires_grad for m in block.members):
            raise GradientError(
                f"weights of {block.name!r} stream but require gradients; call the module under "
                "torch.no_grad() or torch.inference_mode()"
            )
        if number not in self._bound and block.was_given_data():
            raise WeightChanged(
                f"weights of {block.name!r} were given other data while a step was running; change "
                "them between steps"
            )
        with self._lock:
            assert self._ring is not None
            memory = self._ring.acquire(self._ring_numbers[number])
            if self._bound.get(number) is memory:
                return
            if memory is self._ring.place(self._ring_numbers[number]):
                if number not in self._views:
                    self._views[number] = block.views(memory)
                block.bind(self._views[number])
            else:
                block.bind(block.views(memory))
            self._bound[number] = memory

    def done(self, number: int) -> None:
        """A layer ends: its streamed block may be overwritten after the work enqueued so far."""
        with self._lock:
            # The plan cannot have changed meanwhile: plans change when no step is active.
            if self._ring is not None and self._ring.release(self._ring_numbers[number]):
                self._blocks[number].unbind()
                self._bound.pop(number, None)

    def begin_step(self) -> None:
        """Expect the first block."""
        if self._ring is not None:
            self._ring.begin_step()

    def _pin_and_upload(self, streamed: Sequence[int], resident: Sequence[int]) -> None:
        """Pin what streams and what is uploaded once, and begin to upload.

        Where the host budget has both, file by file: neighbours in a file are one registration
        then, and the device copies out of one file while the next is registered.
        """
        phase = self._metrics.setup.phase
        pins = getattr(self._backend, "pins", None)
        first, then = self._memories(streamed), self._memories(resident)
        if pins is not None and sum(m.numel() for m in (*first, *then)) > pins.left_bytes:
            with phase("register"):
                self._backend.pin(first)
                self._backend.pin(then, keep=first)
            with phase("first_fill"):
                self._residents.upload(resident)
        else:
            stays = set(resident)
            for numbers in self._by_file([*streamed, *resident]):
                with phase("register"):
                    self._backend.pin(self._memories(numbers))
                with phase("first_fill"):
                    self._residents.upload([n for n in numbers if n in stays])
        if pins is not None:
            self._tell_slow_tiers(pins.counters)

    def _memories(self, numbers: Sequence[int]) -> list[Tensor]:
        return [copy.memory for number in numbers for copy in self._blocks[number].copies]

    def _by_file(self, numbers: Sequence[int]) -> list[list[int]]:
        """Blocks of one file each; those of several files, or of none, are together and last."""
        groups: dict[int, list[int]] = {}
        others: list[int] = []
        for number in numbers:
            storages = {m.untyped_storage().data_ptr() for m in self._memories([number])}
            is_mapped = all(member.is_mapped for member in self._blocks[number].members)
            if is_mapped and len(storages) == 1:
                groups.setdefault(storages.pop(), []).append(number)
            else:
                others.append(number)
        return [*groups.values(), others] if others else list(groups.values())

    def _tell_slow_tiers(self, counters: PinCounters) -> None:
        slow = counters.staged_bytes + counters.pageable_bytes
        if slow:
            way = "a pinned ring" if counters.staged_bytes else "pageable memory"
            self._metrics.fall_back(
                "host_budget", f"{show_nbytes(slow)} of weights are not pinned and go through {way}"
            )

    def _make_ring(self, plan: OffloadPlan, places: dict[int, int], order: Sequence[int]) -> None:
        if not places:
            return
        memory = self._backend.allocate(plan.ring_bytes)
        numbers = {number: k for k, number in enumerate(places)}
        used = [numbers[number] for number in order if number in numbers]
        unseen = [k for number, k in numbers.items() if number not in set(order)]
        self._ring = Ring(
            self._backend,
            memory,
            [
                RingBlock(nbytes=self._blocks[n].nbytes, begin=begin, copies=self._blocks[n].copies)
                for n, begin in places.items()
            ],
            [*used, *unseen],
        )
        self.expect(plan)
        self._ring_numbers = numbers
        self._ring.prefetch()

    def _drop_ring(self) -> None:
        if self._ring is None:
            return
        self._ring.abandon()
        self._ring.drain()
        self._metrics.retire(self._ring.counters)
        for number in self._ring_numbers:
            self._blocks[number].unbind()
        self._bound.clear()
        self._views.clear()
        self._ring_numbers = {}
        self._ring = None

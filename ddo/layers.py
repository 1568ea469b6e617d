"""The layers of a module while their weights stream: each told when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddo.blocks import Block
from ddo.hooks import LayerHooks
from ddo.metrics import Metrics
from ddo.planning import OffloadPlan
from ddo.profile import Recorder
from ddo.stream import Streamer
from ddo.transfer import Backend, RingCounters


class StreamedLayers:
    """Hooks on layers, and the device memory that they make the layers use.

    Attributes:
        recorder: Observes the step that runs, if it is to be profiled.
    """

    def __init__(
        self, backend: Backend, blocks: Sequence[Block] = (), metrics: Metrics | None = None
    ) -> None:
        self.recorder: Recorder | None = None
        self._blocks = blocks
        self._streamer = Streamer(backend, blocks, metrics or Metrics(backend=backend))
        self._hooks = LayerHooks(self)
        self._streams = False

    @property
    def counters(self) -> RingCounters | None:
        """What the ring has done, if there is one."""
        return self._streamer.counters

    def copied_bytes(self) -> int:
        """Bytes that all rings have copied."""
        return self._streamer.copied_bytes()

    def streamed(self) -> list[tuple[int, Block]]:
        """Blocks that stream, with their numbers."""
        return [(number, self._blocks[number]) for number in self._streamer.streamed]

    def apply(self, plan: OffloadPlan, uses: Sequence[int]) -> None:
        """Make the device hold what the plan says; no step may be running.

        Layers have no hooks until `watch`.

        Raises:
            torch.OutOfMemoryError: The device has not enough memory; nothing is held then.
        """
        self._hooks.remove()
        self._streams = plan.mode == "stream"
        self._streamer.apply(plan, uses)

    def expect(self, plan: OffloadPlan) -> None:
        """Take new predictions for the plan in force."""
        self._streamer.expect(plan)

    def watch(self, *, everything: bool) -> None:
        """Hook the layers whose blocks stream; all layers, for steps that are profiled."""
        self._hooks.remove()
        if not self._streams:
            return
        numbers = range(len(self._blocks)) if everything else self._streamer.streamed
        users: dict[nn.Module, list[int]] = {}
        for number in numbers:
            for user in self._blocks[number].users:
                users.setdefault(user, []).append(number)
        self._hooks.install(list(users.items()))

    def clear(self) -> None:
        """Take the hooks out and give all device memory back. Waits for the device."""
        self._hooks.remove()
        self._streamer.clear()

    def begin_step(self) -> None:
        """Expect the first block."""
        self._streamer.begin_step()

    def leave_all(self) -> None:
        """End the layers of this thread that an error or interrupt has kept from ending."""
        self._hooks.leave_all()

    def reach(self, blocks: Sequence[int]) -> None:
        """Bind the blocks that a layer is about to use. Called by its hook."""
        recorder = self.recorder
        streamed = self._streamer.streamed
        for k, number in enumerate(blocks):
            if recorder is not None:
                recorder.reach(number)
            if number in streamed:
                try:
                    self._streamer.use(number)
                except BaseException:
                    self.leave(blocks[:k])
                    raise
                if recorder is not None:
                    recorder.begin()

    def leave(self, blocks: Sequence[int]) -> None:
        """Unbind the blocks that a layer has used. Called by its hook."""
        streamed = self._streamer.streamed
        for number in reversed(blocks):
            if number in streamed:
                self._streamer.done(number)

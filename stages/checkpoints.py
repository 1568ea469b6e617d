"""Step checkpoints: a denoise that was killed goes on where its last one was written.

A checkpoint belongs to one request, whose digest fixes code, libraries, weights, dtype, options
and seed. What beyond that decides the bits of a step (torch and the device) stands in the
checkpoint and is compared before it is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from stages.checkpoint_files import Checkpoint, CheckpointFiles, remove_quietly
from stages.codec import from_entries, to_entries
from stages.errors import ArtifactError
from stages.loop_state import LoopState
from stages.plain_values import NotPlain

SCHEMA = "exeunt.checkpoint/1"
METADATA_KEY = "exeunt"
NUM_KEPT = 2
"""The newest, and the one before it in case that one is damaged."""

Document = dict[str, Any]


class StepCheckpoints:
    """The checkpoints of one request's loop: written as it goes, used when it begins again.

    Args:
        files: Where they lie.
        every_steps: Steps between two; None: time alone decides.
        every_s: Seconds between two; None: steps alone decide. Whichever is due first counts.
        device: Where the loop's tensors are, such as `cuda:0`.
        warn: Tells the user that a checkpoint could not be used or written.
        is_sound: Whether the loop's values are still worth keeping; asked only when one is due.
        on_resume: Told once of finished steps and all steps when a checkpoint is used.
        clock: Seconds; replaceable in tests.

    Attributes:
        resumed_from_step: Steps that were not run again; 0 when the loop began at its start.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        *,
        every_steps: int | None,
        every_s: float | None,
        device: str,
        warn: Callable[[str], None],
        is_sound: Callable[[], bool] = lambda: True,
        on_resume: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resumed_from_step = 0
        self._files = files
        self._every_steps, self._every_s = every_steps, every_s
        self._device, self._binding = device, bits_binding(device)
        self._warn, self._is_sound, self._clock = warn, is_sound, clock
        self._on_resume = on_resume
        self._state: LoopState | None = None
        self._kept: list[Checkpoint] = []  # usable ones, the oldest first
        self._last_step, self._last_s = 0, clock()
        self._num_written, self._nbytes, self._elapsed_s = 0, 0, 0.0
        self._refusal = ""

    def begin(self, pipe: Any, block_state: Any) -> int:
        """Look at a loop before its first step, and put it where its last checkpoint was.

        Returns:
            The number of steps that need not be run.
        """
        self._last_s = self._clock()
        try:
            self._state = LoopState(pipe, block_state)
        except NotPlain as error:
            self._refusal = str(error)
            return 0
        try:
            stored = self._files.newest_first()
        except ArtifactError as error:
            self._warn(f"checkpoints cannot be looked for: {error}; denoising begins at step 0")
            stored = []
        for number, each in enumerate(stored):
            if self._resume(each, block_state):
                self._kept = [*reversed(stored[number + 1 :][: NUM_KEPT - 1]), each]
                self.resumed_from_step = self._last_step = each.step
                if self._on_resume is not None:
                    self._on_resume(each.step, len(block_state.timesteps))
                break
        return self.resumed_from_step

    def step_done(self, step: int, num_steps: int, block_state: Any) -> None:
        """Write a checkpoint if one is due; the last step needs none.

        Args:
            step: Finished steps, from 1.
        """
        if self._state is None or self._refusal or step >= num_steps or not self._is_due(step):
            return
        started = self._clock()
        self._last_step, self._last_s = step, started
        if not self._is_sound():
            self._refusal = "the latents are not finite"
            return
        try:
            captured = self._state.capture(block_state)
            data = pack(captured, step=step, num_steps=num_steps, binding=self._binding)
            self._kept.append(self._files.write(step, data))
        except NotPlain as error:
            self._refusal = str(error)
            return
        except ArtifactError as error:
            self._refusal = f"none could be written: {error}"
            self._warn(f"no checkpoint can be written: {error}; denoising goes on without")
            return
        self._num_written, self._nbytes = self._num_written + 1, len(data)
        while len(self._kept) > NUM_KEPT:
            remove_quietly(self._files, self._kept.pop(0))
        self._elapsed_s += self._clock() - started

    def clear(self) -> None:
        """Remove the checkpoints of this request, whose result is there."""
        try:
            self._files.clear()
        except ArtifactError as error:
            self._warn(f"a checkpoint that is not needed any more stays: {error}")

    def report(self) -> dict[str, Any]:
        """What was written, and why not; for the stage's report."""
        if self._state is None and not self._refusal:
            self._refusal = "the pipeline has no loop that counts its steps"
        return {
            "every_steps": self._every_steps,
            "every_s": self._every_s,
            "num_written": self._num_written,
            "nbytes": self._nbytes,
            "elapsed_s": round(self._elapsed_s, 6),
            "refusal": self._refusal or None,
        }

    def _is_due(self, step: int) -> bool:
        if self._every_steps is not None and step - self._last_step >= self._every_steps:
            return True
        return self._every_s is not None and self._clock() - self._last_s >= self._every_s

    def _resume(self, checkpoint: Checkpoint, block_state: Any) -> bool:
        """Whether the loop is now where this checkpoint was written."""
        assert self._state is not None
        where = f"checkpoint of step {checkpoint.step} is not used"
        try:
            document, captured = unpack(self._files.read(checkpoint))
        except (ArtifactError, ValueError, KeyError, safetensors.SafetensorError) as error:
            self._warn(f"{where}: {error}")
            remove_quietly(self._files, checkpoint)
            return False
        try:
            self._require_equal(document, checkpoint, len(block_state.timesteps))
            self._state.restore(captured, block_state, self._device)
        except NotPlain as error:
            self._warn(f"{where}: {error}")
            return False
        return True

    def _require_equal(self, document: Document, checkpoint: Checkpoint, num_steps: int) -> None:
        expected = {"step": checkpoint.step, "num_steps": num_steps, **self._binding}
        found = {"step": document["step"], "num_steps": document["num_steps"]}
        found |= document["binding"]
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise NotPlain(
                    f"its {name} is {found.get(name)}, here it is {expected.get(name)}; "
                    "other bits would come out"
                )


def bits_binding(device: str) -> dict[str, str]:
    """What decides the bits of a step and is no part of a request."""
    if device.startswith("cuda"):
        where = {"device": "cuda", "device_name": torch.cuda.get_device_name(device)}
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        threads = str(torch.get_num_threads())  # sums are split among them
        where = {"device": device, "device_name": capability, "num_threads": threads}
    return {"torch": str(torch.__version__), **where}


def pack(captured: dict[str, Any], *, step: int, num_steps: int, binding: dict[str, str]) -> bytes:
    """A checkpoint as one safetensors file.

    Raises:
        ArtifactError: A value that the file cannot hold.
    """
    entries, tree = to_entries(captured)
    document = {
        "schema": SCHEMA,
        "step": step,
        "num_steps": num_steps,
        "binding": binding,
        "tree": tree,
    }
    # Not canonical JSON: a scheduler may hold an infinity, or a zero with a sign.
    metadata = {METADATA_KEY: json.dumps(document, sort_keys=True)}
    data: bytes = safetensors.torch.save(entries, metadata)
    return data


def unpack(data: bytes) -> tuple[Document, dict[str, Any]]:
    """What `pack` was given: the document, and the captured values.

    Raises:
        ValueError: Not a checkpoint, or one of another schema.
        KeyError, SafetensorError: It is malformed.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    document: Document = json.loads(header["__metadata__"][METADATA_KEY])
    if document["schema"] != SCHEMA:
        raise ValueError(f"its schema is {document['schema']!r}, this version reads {SCHEMA!r}")
    return document, from_entries(safetensors.torch.load(data), document["tree"])

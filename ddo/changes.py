"""When a session looks whether its module has changed: while the device has work to do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import nn

from ddo.blocks import Block
from ddo.structure import Structure

HURRY_S = 0.5  # steps that follow each other sooner leave no time to look before them


class Changes:
    """Looks at a module between two steps, or behind the second one if they follow closely.

    Guarded by the session's lock.

    Attributes:
        are_certain: Whether the module has to be taken over anew before anything else.
    """

    def __init__(self, module: nn.Module) -> None:
        self.are_certain = False
        self._structure = Structure(module)
        self._last_end_s = -math.inf  # of the last step, by the host's clock
        self._look_later = self._is_stale = False

    def forget(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        """The module as it is now was taken over."""
        self.are_certain = False
        self._structure = Structure(module)
        self._structure.watch(blocks)

    def close(self) -> None:
        """Give the kernel's table of pages back."""
        self._structure.close()

    def before_step(self) -> None:
        """Look now, unless the last step has just ended."""
        self._look_later = time.perf_counter() - self._last_end_s < HURRY_S
        self._is_stale = False
        if not self._look_later:
            self.are_certain |= self._has_changed()

    def after_step(self) -> bool:
        """Look at what was not looked at before; whether the step met another module."""
        if self._look_later and self._has_changed():
            self.are_certain = self._is_stale = True
        self._last_end_s = time.perf_counter()
        return self._is_stale

    def was_stale(self) -> bool:
        """What `after_step` has said, once."""
        found, self._is_stale = self._is_stale, False
        return found

    def _has_changed(self) -> bool:
        return not self._structure.is_same() or self._structure.is_rewritten()

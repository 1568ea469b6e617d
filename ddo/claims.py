"""Which modules are attached in this process: nobody streams a weight twice."""

from __future__ import annotations

import threading
import weakref

from torch import nn

from ddo.errors import DdoError


class SessionError(DdoError, RuntimeError):
    """A session is asked for something that its state forbids."""


_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def claim(module: nn.Module, owner: object) -> None:
    """Note that a module and all its parts belong to an owner, as long as that lives.

    Raises:
        SessionError: One of them belongs to somebody.
    """
    parts = list(module.modules())
    with _lock:
        for part in parts:
            if part in _owners and _owners[part]() is not None:
                raise SessionError(
                    f"{type(part).__name__} is attached already; detach its session first"
                )
        for part in parts:
            _owners[part] = weakref.ref(owner)


def give_up(owner: object) -> None:
    """Forget all modules of an owner."""
    with _lock:
        for part in [part for part, found in _owners.items() if found() is owner]:
            del _owners[part]

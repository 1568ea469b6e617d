"""A lock that the kernel drops when its holder dies, whatever killed it.

Prefect asks a lock manager for one lock per cache key, so that of several runs that want the
same result one computes it and the others read it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
_SAY_SO_AFTER_S = 5.0
GIVE_UP_AFTER_S = 1.0

_while_waiting: ContextVar[Callable[[], None] | None] = ContextVar("while_waiting", default=None)


@contextmanager
def while_waiting(give_up: Callable[[], None]) -> Iterator[None]:
    """Within the block, who waits long for a lock calls `give_up` once.

    Two runs that share a device would otherwise wait for each other: one holds the lock of a
    result and waits for the device, the other one's idle process holds the device.
    """
    token = _while_waiting.set(give_up)
    try:
        yield
    finally:
        _while_waiting.reset(token)


class _Held(NamedTuple):
    holder: str
    fd: int


class FlockLockManager:
    """`flock(2)` on one file per key; fits Prefect's `LockManager` protocol.

    A lock is its holder's until it is released or its process ends; there is no lease to
    renew and none to outlive its holder. Folders on NFS need version 4.

    Args:
        directory: Where lock files lie, or a function that says so at the first lock, since
            tasks are declared at import and the folder may be settled later. Files go away
            with their locks.
    """

    def __init__(self, directory: Path | Callable[[], Path]) -> None:
        self._directory = directory
        self._held: dict[str, _Held] = {}
        self._mutex = threading.Lock()  # guards _held
        _managers.add(self)

    @property
    def directory(self) -> Path:
        return self._directory if isinstance(self._directory, Path) else self._directory()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlockLockManager:
        return self  # a cache policy is copied with its manager, and the locks are the process's

    def __reduce__(self) -> tuple[type[FlockLockManager], tuple[Path]]:
        return type(self), (self.directory,)

    # ---- the protocol ----------------------------------------------------------------------

    def acquire_lock(
        self,
        key: str,
        holder: str,
        acquire_timeout: float | None = None,
        hold_timeout: float | None = None,
    ) -> bool:
        """Wait until `holder` has the lock; True once it has, at once if it had it before.

        Args:
            key: Any text.
            holder: Names who asks; one holder may ask twice.
            acquire_timeout: Seconds to wait at most; None waits for ever. Then False.
            hold_timeout: Ignored: a stage's run has no length that could be known before.

        Blocks in short sleeps, so that a signal's exception gets through.
        """
        del hold_timeout
        started = time.monotonic()
        wait_s, said_so = _FIRST_WAIT_S, False
        give_up = _while_waiting.get()
        while True:
            with self._mutex:
                if (held := self._held.get(key)) is not None:
                    if held.holder == holder:
                        return True
                elif (fd := self._try(key)) is not None:
                    self._held[key] = _Held(holder, fd)
                    return True
            waited = time.monotonic() - started
            if acquire_timeout is not None and waited >= acquire_timeout:
                return False
            if waited >= GIVE_UP_AFTER_S and give_up is not None:
                give_up()
                give_up = None
            if waited >= _SAY_SO_AFTER_S and not said_so:
                said_so = True
                logger.info("waiting for another run that is computing %s", key)
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)

    async def aacquire_lock(
        self,
        key: str,
        holder: str,
        acquire_timeout: float | None = None,
        hold_timeout: float | None = None,
    ) -> bool:
        """As `acquire_lock`, in a thread."""
        return await asyncio.to_thread(
            self.acquire_lock, key, holder, acquire_timeout, hold_timeout
        )

    def release_lock(self, key: str, holder: str) -> None:
        """Give the lock back.

        Raises:
            ValueError: `holder` does not hold it.
        """
        with self._mutex:
            held = self._held.get(key)
            if held is None or held.holder != holder:
                raise ValueError(f"{holder} does not hold the lock of {key}")
            del self._held[key]
            # Unlinked while still locked: whoever waits on this file gets the lock of a name
            # that is gone, notices it in `_try`, and starts again with the new file.
            self._path(key).unlink(missing_ok=True)
            os.close(held.fd)

    def is_locked(self, key: str) -> bool:
        """Whether anybody holds the lock, here or in another process."""
        with self._mutex:
            if key in self._held:
                return True
            if not self._path(key).exists():
                return False
            if (fd := self._try(key)) is None:
                return True
            self._path(key).unlink(missing_ok=True)
            os.close(fd)
            return False

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether `holder` holds the lock through this manager."""
        with self._mutex:
            held = self._held.get(key)
        return held is not None and held.holder == holder

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Wait until nobody holds the lock; False when `timeout` seconds were not enough."""
        started = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while self.is_locked(key):
            if timeout is not None and time.monotonic() - started >= timeout:
                return False
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return True

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """As `wait_for_lock`, in a thread."""
        return await asyncio.to_thread(self.wait_for_lock, key, timeout)

    # ---- files -----------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        # A digest as the name: keys hold slashes and may be longer than a file name.
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()}.lock"

    def _try(self, key: str) -> int | None:
        """The locked file's descriptor, or None when somebody else has it."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(fd, path):
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # released, and so unlinked, between open and flock

    def _forget_after_fork(self) -> None:
        # A flock belongs to the open file, which parent and child share: without this the
        # lock would live until the child ends too. Closing here leaves the parent's intact.
        for held in self._held.values():
            os.close(held.fd)
        self._held.clear()
        self._mutex = threading.Lock()  # another thread may have held it at the fork


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


_managers: weakref.WeakSet[FlockLockManager] = weakref.WeakSet()


def _forget_all_after_fork() -> None:
    for manager in _managers:
        manager._forget_after_fork()


os.register_at_fork(after_in_child=_forget_all_after_fork)

"""Free ports of the loopback interface."""

from __future__ import annotations

import socket
import time

HOST = "127.0.0.1"
_NUM_LOOKS, _LOOK_S = 25, 0.02
_BACKLOG = 64


def free_port(first: int, last: int, remembered: int | None = None) -> int:
    """The remembered port if it is free, else the first free one of a range.

    Raises:
        OSError: None is free.
    """
    if remembered is not None:
        # The threads of a killed server may hold its socket a little longer than its first one.
        for _ in range(_NUM_LOOKS):
            if _is_free(remembered):
                return remembered
            time.sleep(_LOOK_S)
    for port in range(first, last + 1):
        if _is_free(port):
            return port
    raise OSError(f"no free port between {first} and {last} on {HOST}")


def listener(first: int, last: int, remembered: int | None = None) -> socket.socket:
    """A socket that listens on the port that `free_port` would name, held from now on.

    Raises:
        OSError: None is free.
    """
    while True:
        port = free_port(first, last, remembered)
        found = socket.socket()
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((HOST, port))
            found.listen(_BACKLOG)
        except OSError:  # another process was faster; a socket that listens is not free any more
            found.close()
        else:
            return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: a port that was in use a moment ago is free for it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True

"""Fetch an input from the web, once the user has allowed it: public hosts only, within limits.

A host name is resolved once and the connection goes to the address that was checked, so that
the name cannot lead anywhere else a moment later. Proxies and credentials are not used. This
module loads no torch.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
import urllib.parse
from typing import Any

from stages.errors import RequestError

TIMEOUT_S = 30.0
MAX_REDIRECTS = 3
PIECE = 64 * 2**10  # bytes
REDIRECTS = (301, 302, 303, 307, 308)
SCHEMES = ("http", "https")


def fetch(
    url: str,
    where: str,
    *,
    max_bytes: int,
    timeout_s: float = TIMEOUT_S,
    allow_private: bool = False,
) -> bytes:
    """What a web address holds.

    Args:
        where: How errors call it.
        max_bytes: More is an error, found out before or while it arrives.
        timeout_s: For all of it, redirects included.
        allow_private: Whether addresses of this machine and its networks may be asked.

    Raises:
        RequestError: It cannot be had, is too large, or leads to where nothing may be fetched.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        parts = urllib.parse.urlsplit(url)
        try:
            found = _get(parts, where, max_bytes, deadline, allow_private)
        except TimeoutError as error:
            raise RequestError(f"{where} did not arrive within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{where} cannot be fetched: {error}") from error
        if isinstance(found, bytes):
            return found
        url = urllib.parse.urljoin(url, found)
        following = urllib.parse.urlsplit(url).scheme
        if following not in SCHEMES or (parts.scheme == "https" and following == "http"):
            raise RequestError(
                f"{where} leads from {parts.scheme} on to {following!r}, which is not followed"
            )
    raise RequestError(f"{where} leads on more than {MAX_REDIRECTS} times")


def _get(
    parts: urllib.parse.SplitResult,
    where: str,
    max_bytes: int,
    deadline: float,
    allow_private: bool,
) -> bytes | str:
    """The content, or where a redirect leads."""
    if not parts.hostname or parts.username is not None:
        raise RequestError(f"{where} names no host, or a user; write https://host/path")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection: Any = kind(parts.hostname, parts.port, timeout=_left_s(deadline))

    def connect(address: tuple[str, int], *_: object, **__: object) -> socket.socket:
        return _connected(address, where, deadline, allow_private)

    connection._create_connection = connect  # both classes open their socket by it
    try:
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", urllib.parse.quote(target, safe="/%?&=+:;,@!$'()*~-._[]"))
        response = connection.getresponse()
        if response.status in REDIRECTS and (location := response.getheader("Location")):
            return str(location)
        if response.status != http.client.OK:
            raise RequestError(f"{where} cannot be fetched: {response.status} {response.reason}")
        return _body(connection, response, where, max_bytes, deadline)
    finally:
        connection.close()


def _body(
    connection: Any,
    response: http.client.HTTPResponse,
    where: str,
    max_bytes: int,
    deadline: float,
) -> bytes:
    pieces: list[bytes] = []
    nbytes = response.length or 0
    while nbytes <= max_bytes:
        if connection.sock is not None:
            connection.sock.settimeout(_left_s(deadline))
        _left_s(deadline)
        if not (piece := response.read1(PIECE)):
            break
        pieces.append(piece)
        nbytes = max(response.length or 0, 0) + sum(map(len, pieces))
    if nbytes > max_bytes:
        raise RequestError(
            f"{where} has {nbytes / 2**20:.3g} MiB or more, allowed are "
            f"{max_bytes / 2**20:.3g} MiB; save it smaller and give its path"
        )
    if response.length:
        raise RequestError(f"{where} broke off: {response.length} bytes are missing; try again")
    return b"".join(pieces)


def _connected(
    address: tuple[str, int], where: str, deadline: float, allow_private: bool
) -> socket.socket:
    """A connection to one of a host's addresses, all of which are public."""
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, (ip, *_) in found:
        if not allow_private and not _is_public(str(ip)):
            raise RequestError(
                f"{where} leads to {ip}, an address of this machine or a private network, where "
                "nothing is fetched from; save the file and give its path"
            )
    failure: OSError | None = None
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left_s(deadline))
            connection.connect(place)
        except OSError as error:
            connection.close()
            failure = error
            continue
        return connection
    raise failure or OSError(f"{host} has no address")


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or address
    return address.is_global and not address.is_multicast


def _left_s(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left

"""The bytes of a file or web address that a user gives as an input, read within limits.

What cannot be read is a `RequestError` that names the argument and the place. This module loads
no torch.
"""

from __future__ import annotations

import os
import stat
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from stages.errors import RequestError
from stages.text_rules import escape_for_terminal, kind, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """How large an input may be; both are checked before anything is decoded.

    Attributes:
        max_bytes: Of the file.
        max_pixels: Width x height, as its header says.
    """

    max_bytes: int = 256 * 2**20
    max_pixels: int = 64 * 2**20


def content_of(
    source: object, name: str, allow_urls: bool, limits: InputLimits
) -> tuple[bytes, str]:
    """A source's bytes, and how errors call it.

    Args:
        source: A path, a `file://` URL, or an `http(s)://` URL.
        name: The argument that it is given for.
        allow_urls: Whether anything may be fetched from the network.

    Raises:
        RequestError: It is no path or address, cannot be read, or is empty or too large.
    """
    if not isinstance(source, str | os.PathLike) or isinstance(source, bytes):
        raise RequestError(f"{name} is {shown(source)} ({kind(source)}), expected a path")
    text = os.fspath(source)
    where = f"{name} {escape_for_terminal(text, limit=200)}"
    if not text.strip() or "\0" in text:
        raise RequestError(f"{name} is {shown(text)}, expected a path")
    scheme = urllib.parse.urlsplit(text).scheme.lower() if "://" in text else ""
    if scheme in ("http", "https"):
        if not allow_urls:
            raise RequestError(
                f"{where} is a web address, and nothing is fetched from the network unless "
                "EXEUNT_ALLOW_URLS=1 is set; or save the file and give its path"
            )
        from stages.url_inputs import fetch  # rarely needed, and slow to import

        return fetch(text, where, max_bytes=limits.max_bytes), where
    if scheme not in ("", "file") or text.startswith("data:"):
        raise RequestError(
            f"{where} is no path: its scheme is {(scheme or 'data')!r}, allowed are paths and "
            "file://, http:// and https:// URLs"
        )
    path = _path_of_url(text, where) if scheme == "file" else Path(text).expanduser()
    return _read_file(path, where, limits), where


def _path_of_url(url: str, where: str) -> Path:
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise RequestError(f"{where} names no file of this machine; write file:///absolute/path")
    return Path(path)


def _read_file(path: Path, where: str, limits: InputLimits) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RequestError(f"{where} does not exist; see the path for a mistake") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{where} cannot be opened: {reason}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "no ordinary file"
            raise RequestError(f"{where} is {what}; give the path of one file")
        _check_nbytes(status.st_size, where, limits)
    except RequestError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(limits.max_bytes + 1)
        except OSError as error:
            raise RequestError(f"{where} cannot be read: {error.strerror}") from error
    _check_nbytes(len(data), where, limits)
    return data


def _check_nbytes(nbytes: int, where: str, limits: InputLimits) -> None:
    if nbytes == 0:
        raise RequestError(f"{where} is empty: 0 bytes")
    if nbytes > limits.max_bytes:
        raise RequestError(
            f"{where} has {nbytes / 2**20:.0f} MiB, allowed are {limits.max_bytes / 2**20:.0f} "
            "MiB; save it smaller"
        )

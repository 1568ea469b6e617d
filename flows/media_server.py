"""A small server of the store's pictures and clips, for pages that link them by digest.

It listens on the loopback interface alone and reads alone: `/media/<sha256>` is a picture, clip or
sound of the store, `/thumbnail/<sha256>` a small copy of a picture. There is no list: who does not
know a digest finds nothing. Tensors and documents are not served. This module loads no Prefect.

    python -m flows.media_server --home DIR --store URL --listener FD
"""

from __future__ import annotations

import argparse
import logging
import re
import socket
import threading
import time
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from flows.media_ranges import Span, span_of
from flows.media_types import media_type_of
from flows.ports import HOST
from flows.reports.thumbnails import UNREADABLE, small_copy
from flows.server_state import read_state
from flows.settings import Home
from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef
from stages.errors import ArtifactError

logger = logging.getLogger(__name__)

LONELY_S = 120.0
"""Without the Prefect server whose pages link here, this server ends after so long."""

THUMBNAIL_EDGE = 208  # three stand side by side on Prefect's page of an artifact
_LOOK_EVERY_S = 2.0
_IDLE_S = 30.0
_PIECE = 2**18
_PATH = re.compile(r"/(media|thumbnail)/([0-9a-f]{64})")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    # A browser's own page around a picture or a clip loads it, and has a style of its own.
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; media-src 'self'; "
    "style-src 'unsafe-inline'; sandbox allow-same-origin",
    "Referrer-Policy": "no-referrer",
}
_FOREVER = "private, max-age=31536000, immutable"  # a digest names one content


class MediaServer(ThreadingHTTPServer):
    """Serves one store on the loopback interface.

    Args:
        listener: Listens there already; by default a free port is taken, see `server_port`.
    """

    daemon_threads = True

    def __init__(self, store: ArtifactStore, listener: socket.socket | None = None) -> None:
        self.store = store
        super().__init__((HOST, 0), _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()
            self.server_port = self.server_address[1]
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.thumbnail = lru_cache(maxsize=512)(self._thumbnail)

    def open(self, digest: str) -> tuple[BinaryIO, int]:
        """The intact file of a digest, and its size in bytes.

        Raises:
            ArtifactError, OSError: It is not there, or damaged.
        """
        size = self.store.size(digest)
        if size is None:
            raise FileNotFoundError(digest)
        path = self.store.path(ArtifactRef(digest=digest, size=size))
        return path.open("rb"), size

    def _thumbnail(self, digest: str) -> bytes:
        file, _ = self.open(digest)
        with file:
            if not media_type_of(file).startswith("image/"):
                raise FileNotFoundError(digest)
            return small_copy(file, THUMBNAIL_EDGE)[0]


class _Handler(BaseHTTPRequestHandler):
    server: MediaServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "exeunt", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        self._has_begun = False
        # A page of another site whose name was made to lead here must not read the answers.
        if self.headers.get("Host") not in self.server.hosts:
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        if (found := _PATH.fullmatch(self.path)) is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        kind, digest = found.groups()
        try:
            if kind == "thumbnail":
                self._send_thumbnail(digest, with_body=with_body)
            else:
                file, size = self.server.open(digest)
                with file:
                    self._send_file(file, size, digest, with_body=with_body)
        except (ArtifactError, *UNREADABLE) as error:
            if self._has_begun or isinstance(error, ConnectionError | TimeoutError):
                self.close_connection = True  # the reader has gone, or the file has
                return None
            return self._refuse(HTTPStatus.NOT_FOUND)
        return None

    def _send_thumbnail(self, digest: str, *, with_body: bool) -> None:
        data = self.server.thumbnail(digest)
        self._begin(HTTPStatus.OK, "image/webp", len(data), f"{digest}-{THUMBNAIL_EDGE}")
        if with_body:
            self.wfile.write(data)

    def _send_file(self, file: BinaryIO, size: int, digest: str, *, with_body: bool) -> None:
        media_type = media_type_of(file)
        if not media_type:
            return self._refuse(HTTPStatus.NOT_FOUND)
        if self.headers.get("If-None-Match") == f'"{digest}"':
            return self._begin(HTTPStatus.NOT_MODIFIED, media_type, 0, digest)
        wanted = self.headers.get("Range")
        if self.headers.get("If-Range", f'"{digest}"') != f'"{digest}"':
            wanted = None
        span = span_of(wanted, size)
        if span is None:
            self._begin(HTTPStatus.OK, media_type, size, digest)
            span = Span(0, size)
        elif not span.length:
            return self._refuse(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{size}"}
            )
        else:
            told = {"Content-Range": f"bytes {span.start}-{span.end - 1}/{size}"}
            self._begin(HTTPStatus.PARTIAL_CONTENT, media_type, span.length, digest, told)
        if with_body:
            self._copy(file, span)
        return None

    def _copy(self, file: BinaryIO, span: Span) -> None:
        file.seek(span.start)
        left = span.length
        while left and (piece := file.read(min(_PIECE, left))):
            self.wfile.write(piece)
            left -= len(piece)
        if left:  # the file has lost its end: what was promised cannot be kept
            self.close_connection = True

    def _begin(
        self,
        status: HTTPStatus,
        media_type: str,
        size: int,
        tag: str,
        more: dict[str, str] | None = None,
    ) -> None:
        self._has_begun = True
        self.send_response(status)
        headers = {"Content-Type": media_type, "Content-Length": str(size), "ETag": f'"{tag}"'}
        headers |= {"Accept-Ranges": "bytes", "Cache-Control": _FOREVER, **(more or {})}
        for name, value in (headers | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: HTTPStatus, more: dict[str, str] | None = None) -> None:
        body = f"{status.value} {status.phrase}\n".encode("ascii")
        self.send_response(status)
        headers = {"Content-Type": "text/plain", "Content-Length": str(len(body))}
        for name, value in (headers | _HEADERS | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def _end_when_lonely(server: MediaServer, home: Home, lonely_s: float) -> None:
    """Shut a server down whose Prefect server has been gone for so long, or its home."""
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < lonely_s and home.prefect.is_dir():
        state = read_state(home)
        if state is not None and state.process.is_alive():
            last_seen = time.monotonic()
        time.sleep(_LOOK_EVERY_S)
    server.shutdown()


def main() -> None:
    """Serve until the local Prefect server is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--lonely-s", type=float, default=LONELY_S)
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    with MediaServer(ArtifactStore(options.store), listener) as server:
        watch = (server, Home(root=options.home), options.lonely_s)
        threading.Thread(target=_end_when_lonely, args=watch, daemon=True).start()
        server.serve_forever()


if __name__ == "__main__":
    main()

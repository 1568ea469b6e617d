"""Pictures from the web: refused unless allowed, and then within limits."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from stages.errors import RequestError
from stages.image_inputs import read_picture
from stages.url_inputs import _is_public, fetch
from tests.support.picture_tasks import picture


def content() -> bytes:
    buffer = io.BytesIO()
    picture(1).save(buffer, "PNG")
    return buffer.getvalue()


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        place, _, rest = self.path[1:].partition("?")
        if place == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
            return
        if place == "missing":
            self.send_error(404)
            return
        body = content()
        self.send_response(200)
        if place == "endless":
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(2**16))
            except OSError:
                return
        if place == "silent":
            self.end_headers()
            self.wfile.flush()
            self.server.released.wait(20)  # type: ignore[attr-defined]
            return
        self.send_header("Content-Length", str(len(body) + (place == "cut") * 9))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.released = threading.Event()  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def get(url: str, *, max_bytes: int = 2**20, timeout_s: float = 10.0) -> bytes:
    return fetch(url, "image x", max_bytes=max_bytes, timeout_s=timeout_s, allow_private=True)


def test_nothing_is_fetched_unless_allowed(site: str) -> None:
    with pytest.raises(RequestError, match="nothing is fetched from the network unless EXEUNT_ALL"):
        read_picture(f"{site}/x.png")


def test_private_addresses_are_never_asked(site: str) -> None:
    for url in (f"{site}/x.png", site.replace("127.0.0.1", "localhost") + "/x.png"):
        with pytest.raises(RequestError, match="an address of this machine or a private network"):
            read_picture(url, allow_urls=True)


def test_an_address_is_public_or_not() -> None:
    private = ["10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fe80::1%0"]
    assert not any(
        map(_is_public, [*private, "0.0.0.0", "224.0.0.1", "100.64.0.1", "2002:7f00:1::"])
    )
    assert all(map(_is_public, ["1.1.1.1", "2606:4700::1111"]))


def test_a_picture_is_fetched_and_redirects_are_followed(site: str) -> None:
    assert get(f"{site}/x.png") == content()
    assert get(f"{site}/to?/to?/x.png") == content()
    assert Image.open(io.BytesIO(get(f"{site}/a picture.png"))).size == (64, 64)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("missing", "cannot be fetched: 404"),
        ("cut", "broke off: 9 bytes are missing|cannot be fetched: IncompleteRead"),
        ("to?/to?/to?/to?/x.png", "leads on more than 3 times"),
        ("to?file:///etc/passwd", "leads from http on to 'file', which is not followed"),
        ("to?ftp://1.1.1.1/x", "leads from http on to 'ftp'"),
    ],
)
def test_what_cannot_be_had_is_an_error(site: str, place: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        get(f"{site}/{place}")


def test_size_and_time_are_limited(site: str) -> None:
    with pytest.raises(RequestError, match=r"has .* MiB or more, allowed are 0.00"):
        get(f"{site}/x.png", max_bytes=1000)
    with pytest.raises(RequestError, match=r"has .* MiB or more, allowed are 1 MiB"):
        get(f"{site}/endless")
    with pytest.raises(RequestError, match=r"did not arrive within 0\.2 s"):
        get(f"{site}/silent", timeout_s=0.2)


def test_a_url_names_a_host_and_no_user() -> None:
    for url in ("http:///x.png", "http://me:secret@1.1.1.1/x.png"):
        with pytest.raises(RequestError, match="names no host, or a user"):
            get(url)


def test_a_host_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RequestError, match="cannot be fetched"):
        get("http://nowhere.invalid/x.png")

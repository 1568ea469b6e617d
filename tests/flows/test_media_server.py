"""The server of pictures gives media by digest to this machine's own pages, and nothing else."""

from __future__ import annotations

import http.client
import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from flows.media_ranges import Span, span_of
from flows.media_server import MediaServer, _end_when_lonely
from flows.settings import Home
from stages.artifacts import ArtifactStore

MP4 = b"\0\0\0\x18ftypisom" + bytes(range(256)) * 40


class Shop:
    """A server over a store with a picture, a clip and a tensor file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = ArtifactStore(root / "store")
        buffer = io.BytesIO()
        Image.new("RGB", (600, 300), "red").save(buffer, "PNG")
        self.png = buffer.getvalue()
        self.picture = self.store.put(self.png, "image/png").digest
        self.clip = self.store.put(MP4, "video/mp4").digest
        self.tensors = self.store.put(b"\x08\0\0\0\0\0\0\0{}      ").digest
        self.server = MediaServer(self.store)

    def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=20)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    thread = threading.Thread(target=shop.server.serve_forever, args=(0.02,))
    thread.start()
    yield shop
    shop.server.shutdown()
    thread.join()
    shop.server.server_close()


def test_a_picture_comes_by_its_digest_with_its_type(shop: Shop) -> None:
    status, headers, body = shop.get(f"/media/{shop.picture}")
    assert (status, body, headers["Content-Type"]) == (200, shop.png, "image/png")
    assert (
        headers["X-Content-Type-Options"] == "nosniff" and "immutable" in headers["Cache-Control"]
    )
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, headers, body = shop.get(f"/media/{shop.picture}", If_None_Match=f'"{shop.picture}"')
    assert (status, body) == (304, b"")
    status, headers, body = shop.get(f"/media/{shop.clip}", "HEAD")
    assert (status, body, headers["Content-Type"]) == (200, b"", "video/mp4")
    assert headers["Content-Length"] == str(len(MP4))


def test_a_thumbnail_is_small(shop: Shop) -> None:
    status, headers, body = shop.get(f"/thumbnail/{shop.picture}")
    assert (status, headers["Content-Type"]) == (200, "image/webp")
    assert Image.open(io.BytesIO(body)).size == (208, 104)
    assert shop.get(f"/thumbnail/{shop.clip}")[0] == 404


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        ("bytes=0-99", 206, 0, 100),
        ("bytes=100-", 206, 100, len(MP4)),
        ("bytes=-7", 206, len(MP4) - 7, len(MP4)),
        ("bytes=10000-999999", 206, 10000, len(MP4)),
        ("bytes=0-1,5-6", 200, 0, len(MP4)),
        ("lines=0-1", 200, 0, len(MP4)),
    ],
)
def test_a_player_gets_the_part_it_asks_for(
    shop: Shop, asked: str, status: int, start: int, end: int
) -> None:
    found, headers, body = shop.get(f"/media/{shop.clip}", Range=asked)
    assert (found, body) == (status, MP4[start:end])
    if status == 206:
        assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(MP4)}"


def test_a_part_that_is_not_there_is_refused(shop: Shop) -> None:
    status, headers, _ = shop.get(f"/media/{shop.clip}", Range=f"bytes={len(MP4)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(MP4)}")
    status, _, body = shop.get(f"/media/{shop.clip}", Range="bytes=0-9", If_Range='"another"')
    assert (status, body) == (200, MP4)


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=-0", Span(10, 10)),
        ("bytes=-99", Span(0, 10)),
        ("bytes=9-9", Span(9, 10)),
        ("bytes=10-10", Span(10, 10)),
        ("bytes=" + "9" * 40 + "-", None),
    ],
)
def test_ranges_are_read_as_the_standard_says(header: str | None, span: Span | None) -> None:
    assert span_of(header, 10) == span


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/media/",
        "/media",
        "/objects/",
        "/media/{picture}/",
        "/media/{picture}?x=1",
        "/media/{picture_upper}",
        "/media/{picture_short}",
        "/media/../store/objects/sha256/{picture}",
        "/media/..%2f..%2fetc%2fpasswd",
        "/media/{unknown}",
        "/media/{tensors}",
        "/thumbnail/{tensors}",
    ],
)
def test_nothing_else_is_served(shop: Shop, path: str) -> None:
    names = {"picture": shop.picture, "picture_upper": shop.picture.upper(), "unknown": "0" * 64}
    names |= {"picture_short": shop.picture[:-1], "tensors": shop.tensors}
    assert shop.get(path.format(**names))[0] == 404


def test_another_name_for_this_machine_gets_nothing(shop: Shop) -> None:
    """A page of the web may have its own name lead to 127.0.0.1."""
    port = shop.server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert shop.get(f"/media/{shop.picture}", Host=host)[0] == 421
    assert shop.get(f"/media/{shop.picture}", Host=f"localhost:{port}")[0] == 200


def test_nothing_can_be_written(shop: Shop) -> None:
    before = sorted(path.name for path in shop.root.rglob("*"))
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        assert shop.get(f"/media/{shop.picture}", method)[0] == 501
    assert sorted(path.name for path in shop.root.rglob("*")) == before


def test_it_listens_on_the_loopback_interface_alone(shop: Shop) -> None:
    assert shop.server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET) as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", shop.server.server_port))


def test_a_damaged_picture_is_not_shown(shop: Shop) -> None:
    (path,) = (shop.root / "store").rglob(shop.picture)
    path.chmod(0o600)
    path.write_bytes(shop.png[:-1] + b"!")
    assert shop.get(f"/media/{shop.picture}")[0] == 404


def test_many_readers_are_served_at_a_time(shop: Shop) -> None:
    bodies: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: bodies.append(shop.get(f"/media/{shop.clip}")[2]))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bodies == [MP4] * 20


def test_it_ends_when_its_home_is_gone(shop: Shop) -> None:
    """Without one, there is no Prefect server either, and nobody would ever stop it."""
    thread = threading.Thread(target=shop.server.serve_forever, args=(0.02,))
    shop.server.shutdown()  # the fixture's loop ends as it would; this is another one
    thread.start()
    _end_when_lonely(shop.server, Home(root=shop.root / "gone"), lonely_s=60.0)
    thread.join(20)
    assert not thread.is_alive()

"""The artifact store's promises, kept by each kind of store."""

import io
import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from PIL import Image

from stages.artifact_records import record_key
from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef, StageRequest, StageResult
from stages.errors import ArtifactError, ArtifactMissing
from stages.local_files import LocalFiles, object_key
from stages.remote_files import RemoteFiles
from stages.safetensors_header import pack

Damage = Callable[[str, bytes | None], None]


def request(**options: Any) -> StageRequest:
    return StageRequest(
        stage="encode",
        code_version="1",
        family="miniature",
        task="text-to-image",
        dtype="float32",
        options={"prompt": "a red circle", **options},
    )


def result(**artifacts: ArtifactRef) -> StageResult:
    return StageResult(stage="encode", artifacts=artifacts)


@pytest.fixture(params=["folder", "file-url", "memory", "renaming"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """A store of each kind; `renaming` is a remote one that has no whole puts."""
    root, cache = tmp_path / "store with ünïcode", tmp_path / "cache"
    if request.param == "folder":
        return ArtifactStore(root)
    if request.param == "file-url":
        return ArtifactStore(f"file://{root}")
    store = ArtifactStore(f"memory://{secrets.token_hex(8)}", cache_dir=cache)
    if request.param == "renaming":
        store._files = RemoteFiles(
            str(root), LocalFiles(cache), fsspec.filesystem("file", skip_instance_cache=True)
        )
    return store


@pytest.fixture
def overwrite(store: ArtifactStore) -> Damage:
    """Change a stored file behind the store's back; None removes it."""

    def change(key: str, data: bytes | None) -> None:
        files = store._files
        if isinstance(files, LocalFiles):
            path = files.root / key
            path.unlink() if data is None else path.write_bytes(data)
        elif data is None:
            files._fs.rm_file(files._path(key))
        else:
            files._fs.pipe_file(files._path(key), data)

    return change


def test_what_is_put_is_read_back(store: ArtifactStore) -> None:
    ref = store.put(b"latents", "application/octet-stream")

    assert ref == store.put(b"latents", "application/octet-stream")
    assert (ref.size, ref.media_type) == (7, "application/octet-stream")
    assert store.read(ref) == store.path(ref).read_bytes() == b"latents"
    store.verify(ref)


def test_an_empty_artifact_is_an_artifact(store: ArtifactStore) -> None:
    assert store.read(store.put(b"")) == b""


def test_a_file_is_moved_into_the_store(store: ArtifactStore) -> None:
    temp = store.temp_path()
    temp.write_bytes(b"a stream of steps")

    ref = store.put_file(temp)

    assert not temp.exists()
    assert ref == store.put(b"a stream of steps")


def test_a_file_that_has_a_second_name_is_copied(store: ArtifactStore, tmp_path: Path) -> None:
    path, second = tmp_path / "mine", tmp_path / "also-mine"
    path.write_bytes(b"abc")
    second.hardlink_to(path)

    ref = store.put_file(path)
    second.write_bytes(b"changed later")

    assert not path.exists()
    assert store.read(ref) == b"abc"


def test_an_artifact_written_in_pieces_appears_when_its_block_ends(store: ArtifactStore) -> None:
    with store.create(nbytes=8) as artifact:
        artifact.write(b"late")
        artifact.write(memoryview(b"nts!"))
        assert not store.ls()
        with pytest.raises(ArtifactError, match="no reference before it is complete"):
            _ = artifact.ref

    assert store.read(artifact.ref) == b"latents!"


def test_a_failure_while_writing_leaves_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    before = _files_below(tmp_path)

    with pytest.raises(FileNotFoundError), store.create() as artifact:
        artifact.write(b"half")
        (tmp_path / "not-there").read_bytes()  # the caller's own error passes through

    assert _files_below(tmp_path) == before
    assert not store.ls()


def test_an_absent_artifact_is_missing(store: ArtifactStore) -> None:
    ref = ArtifactRef(digest="ab" * 32, size=3)

    for use in (store.verify, store.path, store.read):
        with pytest.raises(ArtifactMissing, match=rf"{ref.digest} \(3 bytes\) is not in"):
            use(ref)


@pytest.mark.parametrize("garbage", [b"garbage", b"short", b"", b"much too long"])
@pytest.mark.parametrize("use", ["verify", "path", "read"])
def test_a_damaged_artifact_is_set_aside_and_made_again(
    store: ArtifactStore, overwrite: Damage, garbage: bytes, use: str
) -> None:
    ref = store.put(b"latents")
    if not isinstance(store._files, LocalFiles):
        store._files.cache.remove(object_key(ref.digest))  # else its intact copy serves
    overwrite(object_key(ref.digest), garbage)

    with pytest.raises(ArtifactMissing, match=f"{ref.digest}.* is damaged"):
        getattr(store, use)(ref)

    assert not store.ls()
    assert [e.key for e in store._files.entries("objects")] == [f"{object_key(ref.digest)}.bad"]
    assert store.read(store.put(b"latents")) == b"latents"


def test_putting_again_mends_a_damaged_artifact(store: ArtifactStore, overwrite: Damage) -> None:
    ref = store.put(b"latents")
    overwrite(object_key(ref.digest), b"garbage")

    store.put(b"latents")

    assert store.read(ref) == b"latents"
    assert store.verify_all().is_intact


def test_an_equal_request_finds_its_result_in_another_store_object(
    store: ArtifactStore, tmp_path: Path
) -> None:
    assert store.lookup(request()) is None
    made = result(embeds=store.put(b"embeds"))

    store.record(request(), made)

    assert store.lookup(request()) == made
    assert store.lookup(request(prompt="a blue circle")) is None
    if isinstance(store._files, LocalFiles):
        assert ArtifactStore(store.url).lookup(request()) == made


def test_a_result_without_its_artifact_is_not_recorded(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactMissing, match="'embeds'"):
        store.record(request(), result(embeds=ArtifactRef(digest="ab" * 32, size=3)))

    assert store.lookup(request()) is None


@pytest.mark.parametrize("data", [None, b"garbage"])
def test_a_result_whose_artifact_is_gone_is_a_miss(
    store: ArtifactStore, overwrite: Damage, data: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    ref = store.put(b"latents")
    store.record(request(), result(embeds=ref))
    if not isinstance(store._files, LocalFiles):
        store._files.cache.remove(object_key(ref.digest))
    overwrite(object_key(ref.digest), data)

    assert store.lookup(request()) is None
    assert "artifact missing, recomputing encode" in caplog.text

    store.put(b"latents")
    assert store.lookup(request()) == result(embeds=ref)


def _with(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda _: b"", "JSONDecodeError"),
        (lambda data: data[: len(data) // 2], "JSONDecodeError"),
        (lambda _: b"\xff\xfe\x00", "UnicodeDecodeError"),
        (lambda _: b"[" * 100_000, "RecursionError|JSONDecodeError"),
        (lambda _: b"[1, 2]", "TypeError"),
        (lambda _: b"{}", "KeyError"),
        (lambda data: data.replace(b'"size":6', b'"size":7'), "does not match its checksum"),
        (lambda data: data.replace(b"a red circle", b"a red square"), "not the one"),
        (_with(request_digest="cd" * 32), "not the one"),
        (_with(format=2), "its format is 2, this version reads 1"),
        (_with(format=0), "its format is 0, this version reads 1"),
        (lambda data: data + b" " * (17 * 2**20), "more than 16777216 bytes"),
    ],
)
def test_a_record_that_cannot_be_trusted_is_a_miss(
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ArtifactStore(tmp_path)
    store.record(request(), result(embeds=store.put(b"embeds")))
    path = tmp_path / record_key("encode", request().digest)
    path.write_bytes(damage(path.read_bytes()))

    assert store.lookup(request()) is None
    (entry,) = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert "is not used" in entry.getMessage()
    assert any(part in entry.getMessage() for part in reason.split("|"))


def test_a_record_holds_what_was_asked_without_host_paths(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.put(b"embeds")
    store.record(request(), result(embeds=ref))

    (path,) = (tmp_path / "records" / "encode").iterdir()
    record = json.loads(path.read_bytes())

    assert path.name == f"{request().digest}.json"
    assert record["format"] == 1
    assert record["request"]["options"] == {"prompt": "a red circle"}
    assert record["result"]["artifacts"]["embeds"]["digest"] == ref.digest
    assert str(tmp_path) not in path.read_text()


def test_a_store_can_be_moved(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "here")
    made = result(embeds=store.put(b"embeds"))
    store.record(request(), made)

    (tmp_path / "here").rename(tmp_path / "there")

    assert ArtifactStore(tmp_path / "there").lookup(request()) == made


def test_a_lookup_notes_the_time_of_use(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.put(b"embeds")
    store.record(request(), result(embeds=ref))
    paths = [tmp_path / record_key("encode", request().digest), tmp_path / object_key(ref.digest)]
    for path in paths:
        os.utime(path, (1e9, 1e9))

    assert store.lookup(request())

    for path in paths:
        assert path.stat().st_mtime > 1.5e9


def test_looking_into_a_store_that_does_not_exist_makes_no_folder(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "nowhere")

    assert store.lookup(request()) is None
    assert store.ls() == []
    assert store.gc(0).objects == []
    assert store.verify_all().is_intact
    assert not (tmp_path / "nowhere").exists()


def test_request_digests_are_equal_in_every_process() -> None:
    code = (
        "from stages.contracts import *\n"
        "options = dict([('b', [1, 2.5, None]), ('a', {'y': -0.0, 'x': 'ü'})][::ORDER])\n"
        "r = StageRequest(stage='denoise', code_version='1', family='f', task='t',\n"
        "    dtype='bfloat16', options=options, seed=2**64 - 1, label='L ORDER',\n"
        "    components={k: k * 64 for k in {'a', 'b', 'c'}})\n"
        "print(r.digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code.replace("ORDER", order)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed, order in [("1", "1"), ("2", "-1"), ("3", "1")]
    }

    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_importing_the_store_loads_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, stages.artifacts, stages.safetensors_header\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'safetensors', 'PIL'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("url", ["", "nosuchprotocol://x"])
def test_a_store_that_cannot_be_opened_says_so(url: str) -> None:
    with pytest.raises(ArtifactError, match=r"empty path|nosuchprotocol"):
        ArtifactStore(url)


def test_passwords_in_a_url_are_not_shown(tmp_path: Path) -> None:
    store = ArtifactStore("memory://user:s3cret@bucket/x", cache_dir=tmp_path)

    assert store.url == "memory://***@bucket/x"
    with pytest.raises(ArtifactMissing) as caught:
        store.read(ArtifactRef(digest="ab" * 32, size=3))
    assert "s3cret" not in str(caught.value)


def test_an_object_is_shown_by_what_it_holds(store: ArtifactStore) -> None:
    ref = store.put(b'{"steps": 4}', "application/json")
    store.record(request(), result(report=ref))

    assert store.show(ref.digest[:8]) == {
        "digest": ref.digest,
        "size": 12,
        "media_type": "application/json",
        "stages": ["encode"],
        "kind": "json",
        "value": {"steps": 4},
    }
    (item,) = store.ls()
    assert (item.digest, item.size, item.stages) == (ref.digest, 12, ("encode",))
    with pytest.raises(ArtifactMissing, match="no artifact begins with 'zz'"):
        store.show("zz")
    store.put(b"another")
    with pytest.raises(ArtifactError, match="2 artifacts begin with ''"):
        store.show("")


def test_tensors_are_shown_by_their_header(store: ArtifactStore) -> None:
    data = pack({"latents": {"dtype": "BF16", "shape": (1, 4), "data": bytes(8)}}, {"schema": "1"})

    shown = store.show(store.put(data).digest)

    assert shown["kind"] == "safetensors"
    assert shown["tensors"] == [{"name": "latents", "dtype": "BF16", "shape": [1, 4], "nbytes": 8}]
    assert shown["metadata"] == {"schema": "1"}
    assert (shown["media_type"], shown["stages"]) == (None, [])


def test_pictures_and_unknown_bytes_are_shown(store: ArtifactStore) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, "PNG")

    picture = store.show(store.put(buffer.getvalue(), "image/png").digest)
    other = store.show(store.put(b"\xff\xfe", "application/octet-stream").digest)

    assert (picture["kind"], picture["width"], picture["height"]) == ("png", 31, 17)
    assert other["kind"] == "bytes"


def _files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}

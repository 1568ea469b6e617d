"""The store under full disks, missing permissions, racing writers and killed processes."""

import ctypes
import hashlib
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef, StageRequest, StageResult
from stages.errors import ArtifactError, ArtifactMissing, ModelError
from stages.local_files import object_key
from stages.models import open_model
from tests.support.fake_models import write_model
from tests.support.saved import write_png
from tests.support.users import NOBODY, nobody, open_to_others

MIB = 2**20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


# ---- full disks ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 10 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=10m,nr_inodes=100"):
        pytest.skip(f"needs to mount a disk of its own: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


def _unknown_size(store: ArtifactStore, data: bytes) -> None:
    """Write in pieces, so that the disk fills up midway."""
    with store.create() as artifact:
        for start in range(0, len(data), MIB):
            artifact.write(data[start : start + MIB])


def _known_size(store: ArtifactStore, data: bytes) -> None:
    with store.create(nbytes=len(data)) as artifact:
        artifact.write(data)


@pytest.mark.parametrize("write", [ArtifactStore.put, _known_size, _unknown_size])
@pytest.mark.parametrize("filled", [0, 9 * MIB])
def test_a_full_disk_is_reported_and_leaves_the_old_artifact(
    small_disk: Path, write: Callable[[ArtifactStore, bytes], object], filled: int
) -> None:
    store = ArtifactStore(small_disk)
    old = store.put(b"old artifact")
    (small_disk / "other data").write_bytes(bytes(filled))

    with pytest.raises(ArtifactError, match=r"no space: need .* MiB \(\d+ bytes\), free .* in /"):
        write(store, os.urandom(12 * MIB))

    assert store.read(old) == b"old artifact"
    assert not list(small_disk.rglob("*.tmp-*"))
    (small_disk / "other data").unlink()
    assert store.put(os.urandom(8 * MIB)).size == 8 * MIB


def test_a_full_output_disk_is_reported_and_keeps_earlier_pictures(small_disk: Path) -> None:
    earlier = write_png(b"earlier picture", small_disk, prompt="a fox", seed=1)

    with pytest.raises(ArtifactError, match=r"no space: need .* MiB \(\d+ bytes\), free .* in /"):
        write_png(os.urandom(12 * MIB), small_disk, prompt="a fox", seed=1)

    assert [path.name for path in small_disk.iterdir()] == [earlier.name]
    assert earlier.read_bytes() == b"earlier picture"


def test_a_disk_without_file_entries_is_told_from_a_full_one(small_disk: Path) -> None:
    store = ArtifactStore(small_disk)
    store.put(b"old artifact")
    for number in range(100):
        try:
            (small_disk / f"file {number}").touch()
        except OSError:
            break

    with pytest.raises(ArtifactError, match=r"no space|file entries free"):
        store.put(b"new artifact")


def test_a_limit_on_file_sizes_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(ArtifactError, match=r"cannot write \d+ bytes .*File too large"):
            store.put(bytes(2 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


# ---- permissions ---------------------------------------------------------------------------


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """A folder that another user can reach."""
    return open_to_others(tmp_path)


@as_root
@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_a_store_that_cannot_be_written_is_found_at_preflight(
    shared_folder: Path, mode: int
) -> None:
    folder = shared_folder / "store"
    folder.mkdir()
    folder.chmod(mode)
    store = ArtifactStore(folder)
    expected = f"not writable for uid {NOBODY}: {folder} (owner uid 0, mode {mode:04o})"

    for use in (store.check_writable, lambda: store.put(b"x"), store.temp_path):
        with nobody(), pytest.raises(ArtifactError, match=re.escape(expected)):
            use()

    assert not list(folder.iterdir())


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ArtifactError, match="not a folder"):
        ArtifactStore(tmp_path / "file").check_writable()


@as_root
def test_another_users_store_can_be_read_and_not_mended(
    shared_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(shared_folder / "store")
    good, bad = store.put(b"good"), store.put(b"bad!")
    asked = StageRequest(stage="encode", code_version="1", family="f", task="t", dtype="float32")
    made = StageResult(stage="encode", artifacts={"embeds": good})
    store.record(asked, made)
    (shared_folder / "store" / object_key(bad.digest)).write_bytes(b"evil")

    with nobody():
        assert store.read(good) == b"good"
        assert store.lookup(asked) == made
        with pytest.raises(ArtifactMissing):
            store.verify(bad)

    assert "cannot be moved" in caplog.text
    assert len(store.ls()) == 2


@as_root
@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_reads_artifacts(shared_folder: Path, umask: int, mode: int) -> None:
    folder = shared_folder / "store"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)

    with nobody(umask):
        ArtifactStore(folder).put(b"x")

    (path,) = (path for path in (folder / "objects").rglob("*") if path.is_file())
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (mode, NOBODY)


@as_root
def test_a_model_that_may_only_be_read_is_fingerprinted(shared_folder: Path) -> None:
    """The model folder is read-only; what is remembered goes elsewhere, or nowhere."""
    model = write_model(shared_folder / "model")
    home = shared_folder / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    expected = [c.fingerprint(shared_folder) for c in open_model(model).components.values()]
    before = sorted(model.rglob("*"))

    for folder in (home, shared_folder / "no home at all"):
        with nobody():
            found = [c.fingerprint(folder) for c in open_model(model).components.values()]
        assert found == expected

    assert sorted(model.rglob("*")) == before
    assert not (shared_folder / "no home at all").exists()


@as_root
def test_a_model_file_that_may_not_be_read_is_named(shared_folder: Path) -> None:
    model = write_model(shared_folder / "model")
    secret = model / "vae" / "config.json"
    secret.chmod(0o600)
    expected = f"cannot be read by uid {NOBODY}: {secret}"

    with nobody(), pytest.raises(ModelError, match=re.escape(expected)):
        open_model(model)

    secret.parent.chmod(0o700)
    with nobody(), pytest.raises(ModelError, match=rf"cannot read .*vae.* as uid {NOBODY}"):
        open_model(model)


# ---- races ---------------------------------------------------------------------------------

RACE = """
import os, sys
from stages.artifacts import ArtifactStore
from stages.contracts import StageRequest, StageResult
store = ArtifactStore(sys.argv[1])
data = b"content" * 100_000
request = StageRequest(stage="encode", code_version="1", family="f", task="t", dtype="float32")

def work():
    ref = store.put(data)
    assert store.read(ref) == data
    result = StageResult(stage="encode", artifacts={"x": ref})
    store.record(request, result)
    assert store.lookup(request) == result
    os.write(1, f"{ref.digest}\\n".encode())  # in one piece, unlike print

start, end = os.pipe()
pids = []
for _ in range(20):
    if (pid := os.fork()) == 0:
        os.close(end)
        os.read(start, 1)  # all start together, when the pipe is closed
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\\n".encode())
        finally:
            os._exit(0)
    pids.append(pid)
os.close(end)
for pid in pids:
    os.waitpid(pid, 0)
"""


def test_twenty_processes_that_write_one_artifact_agree(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True, check=True
    )

    digest = hashlib.sha256(b"content" * 100_000).hexdigest()
    assert (run.stdout.split(), run.stderr) == ([digest] * 20, "")
    files = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert len(files) == 2
    assert digest in files


def test_threads_that_write_and_read_one_artifact_agree(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    data = bytes(300_000)
    ref = ArtifactRef(digest=hashlib.sha256(data).hexdigest(), size=len(data))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                assert store.put(data) == ref
                assert store.read(ref) == data
                store.verify(ref)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert [item.digest for item in store.ls()] == [ref.digest]


# ---- killed processes ----------------------------------------------------------------------

VICTIMS = """
import os, random, signal, sys, time
from stages.artifacts import ArtifactStore
from stages.contracts import StageRequest, StageResult
store = ArtifactStore(sys.argv[1])
data = b"latents!" * 500_000
instants = random.Random(20)

def work(num_artifacts):
    for number in range(num_artifacts):
        request = StageRequest(stage="denoise", code_version="1", family="f", task="t",
                               dtype="float32", seed=number)
        with store.create(nbytes=len(data)) as artifact:
            half = len(data) // 2
            artifact.write(data[:half])
            artifact.write(data[half:] + str(number).encode())
        store.record(request, StageResult(stage="denoise", artifacts={"latents": artifact.ref}))

begin = time.monotonic()
work(4)
each_s = (time.monotonic() - begin) / 4
print("ready", flush=True)
while sys.stdin.readline():
    if (pid := os.fork()) == 0:
        work(10_000)
        os._exit(0)
    time.sleep(instants.uniform(0, 3 * each_s))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print(pid, flush=True)
"""


def test_a_killed_writer_leaves_nothing_or_a_valid_artifact(tmp_path: Path) -> None:
    """Thirty writers, each killed at a random instant of its work."""
    store = ArtifactStore(tmp_path)
    num_temps = num_records = 0
    with subprocess.Popen(
        [sys.executable, "-c", VICTIMS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as nursery:
        assert nursery.stdin
        assert nursery.stdout
        assert nursery.stdout.readline() == "ready\n"
        for _ in range(30):
            _empty(store)  # each one starts from nothing
            nursery.stdin.write("next\n")
            nursery.stdin.flush()
            pid = int(nursery.stdout.readline())
            report = store.verify_all()
            assert report.is_intact
            assert not report.unreadable_records
            temps = list(tmp_path.rglob("*.tmp-*"))
            assert all(f"-{pid}-" in temp.name for temp in temps)
            for temp in temps:
                os.utime(temp, (0, 0))
            assert len(store.gc(older_than_s=1e9).leftovers) == len(temps)
            num_temps += len(temps)
            num_records += len(list(tmp_path.rglob("*.json")))
        nursery.stdin.close()
        nursery.stdin = None

    assert num_temps > 0, "no writer was killed while it wrote"
    assert num_records > 0, "no writer finished anything before it was killed"


def _empty(store: ArtifactStore) -> None:
    for path in Path(store.url).rglob("*"):
        if path.is_file():
            path.unlink()


def test_the_same_content_is_stored_again_after_a_kill(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    temp = store.temp_path()
    temp.write_bytes(b"half a lat")  # what a killed writer leaves

    ref = store.put(b"half a latent")

    assert store.read(ref) == b"half a latent"
    assert [item.digest for item in store.ls()] == [ref.digest]

"""A component's fingerprint follows its content, and is computed once per change."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.errors import ModelError
from stages.fingerprints import file_sha256
from stages.models import open_model
from tests.support.fake_models import write_json, write_model

LONG_AGO = 10**18  # nanoseconds since 1970
MIB = 2**20


class Reads:
    """Counts the files that are read, through the progress callback."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))

    def count(self) -> int:
        """How many files were read to their end since the last call."""
        finished = {call for call in self.calls if call[0] == call[1]}
        self.calls.clear()
        return len(finished)


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    """A file that is old enough for any change to show in its times."""
    path = tmp_path / "model" / "big.safetensors"
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 64)
    _wait_until_settled(path)
    return path


def _wait_until_settled(path: Path) -> None:
    """Let the clock of the file's disk pass the file's own times."""
    from stages.file_writes import is_settled

    while not is_settled(path.stat()):
        os.sched_yield()


def test_an_unchanged_file_is_read_once(weights_file: Path, tmp_path: Path) -> None:
    reads = Reads()

    first = file_sha256(weights_file, tmp_path, progress=reads)
    assert reads.count() == 1
    assert file_sha256(weights_file, tmp_path, progress=reads) == first
    assert reads.count() == 0
    assert file_sha256(weights_file, tmp_path, progress=reads, verify=True) == first
    assert reads.count() == 1


def _flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff")


def _flip_and_restore_the_time(path: Path) -> None:
    before = path.stat()
    _flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_by_an_older_file(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(LONG_AGO, LONG_AGO))
    other.replace(path)


def _retarget(path: Path) -> None:
    target = path.with_name("other")
    target.write_bytes(path.read_bytes()[::-1])
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    "change", [_flip_a_byte, _flip_and_restore_the_time, _replace_by_an_older_file, _retarget]
)
def test_any_change_that_keeps_the_size_is_noticed(
    weights_file: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    size = weights_file.stat().st_size
    first = file_sha256(weights_file, tmp_path)

    change(weights_file)

    assert weights_file.stat().st_size == size
    assert file_sha256(weights_file, tmp_path) != first


def test_a_file_that_may_still_change_unseen_is_not_remembered(
    weights_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write within the same tick of the disk's clock leaves all times as they are."""
    monkeypatch.setattr("stages.fingerprints.is_settled", lambda status: False)
    reads = Reads()

    file_sha256(weights_file, tmp_path, progress=reads)
    file_sha256(weights_file, tmp_path, progress=reads)

    assert len(reads.calls) == 2
    assert not (tmp_path / "fingerprints").exists()


@pytest.mark.parametrize("memory", ["", "{}", "[]", '{"format": 99}', "\xff"])
def test_a_damaged_memory_is_no_memory(weights_file: Path, tmp_path: Path, memory: str) -> None:
    first = file_sha256(weights_file, tmp_path)
    (path,) = (tmp_path / "fingerprints").iterdir()
    path.write_text(memory)

    assert file_sha256(weights_file, tmp_path) == first


def test_memory_of_another_device_is_not_trusted(weights_file: Path, tmp_path: Path) -> None:
    file_sha256(weights_file, tmp_path)
    (path,) = (tmp_path / "fingerprints").iterdir()
    document = json.loads(path.read_text())
    document["stat"][-1] += 1
    path.write_text(json.dumps(document))
    reads = Reads()

    file_sha256(weights_file, tmp_path, progress=reads)

    assert reads.count() == 1


def test_a_home_that_cannot_be_written_costs_memory_only(
    weights_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")

    first = file_sha256(weights_file, tmp_path / "home")

    assert file_sha256(weights_file, tmp_path / "home") == first
    assert "is not remembered" in caplog.text


def test_progress_ends_at_the_files_size(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(5 * MIB + 1)
    reads = Reads()

    file_sha256(path, tmp_path, progress=reads)

    done = [done for done, _ in reads.calls]
    assert done == sorted(done)
    assert reads.calls[-1] == (5 * MIB + 1, 5 * MIB + 1)
    assert len(reads.calls) >= 5


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*nothing"):
        file_sha256(tmp_path / "nothing", tmp_path)


# ---- components ----------------------------------------------------------------------------


def _fingerprints(directory: Path, home: Path) -> dict[str, str]:
    components = open_model(directory).components
    return {name: component.fingerprint(home) for name, component in components.items()}


def test_a_moved_model_keeps_its_fingerprints(tmp_path: Path) -> None:
    before = _fingerprints(write_model(tmp_path / "here"), tmp_path)

    (tmp_path / "here").rename(tmp_path / "there")

    assert _fingerprints(tmp_path / "there", tmp_path) == before


@pytest.mark.parametrize(
    ("path", "component"),
    [
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("vae/config.json", "vae"),
        ("transformer/diffusion_pytorch_model-00003-of-00003.safetensors", "transformer"),
        ("tokenizer/vocab.json", "tokenizer"),
        ("scheduler/scheduler_config.json", "scheduler"),
    ],
)
def test_a_changed_byte_changes_the_fingerprint_of_its_component_alone(
    tmp_path: Path, path: str, component: str
) -> None:
    directory = write_model(tmp_path / "model")
    before = _fingerprints(directory, tmp_path)
    file = directory / path
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x01 if file.suffix == ".safetensors" else 0x00
    file.write_bytes(bytes(data) if file.suffix == ".safetensors" else bytes(data) + b"\n")

    after = _fingerprints(directory, tmp_path)

    assert {name for name in before if before[name] != after[name]} == {component}


def test_readmes_and_code_are_no_part_of_a_fingerprint(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    before = _fingerprints(directory, tmp_path)

    for name in ("README.md", ".gitattributes", "LICENSE", "notes.py"):
        (directory / "vae" / name).write_text("words")

    assert _fingerprints(directory, tmp_path) == before


def test_another_class_or_another_config_is_another_component(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    before = open_model(directory)
    index = json.loads((directory / "model_index.json").read_text())
    write_json(directory / "model_index.json", index | {"vae": ["diffusers", "AutoencoderTiny"]})

    after = open_model(directory)

    assert after.index_digest != before.index_digest
    vae, old_vae = after.components["vae"], before.components["vae"]
    assert vae.fingerprint(tmp_path) != old_vae.fingerprint(tmp_path)
    assert vae.config_digest != old_vae.config_digest
    assert vae.header_digest == old_vae.header_digest
    write_json(directory / "model_index.json", index | {"boundary_ratio": 0.9})
    assert open_model(directory).index_digest != before.index_digest


def test_header_digests_ignore_values_and_follow_shapes(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    path = directory / "vae" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    before = open_model(directory).components["vae"].header_digest

    path.write_bytes(data[:-1] + b"\x7f")
    assert open_model(directory).components["vae"].header_digest == before

    path.write_bytes(data.replace(b"[2,2]", b"[4,1]"))
    assert open_model(directory).components["vae"].header_digest != before

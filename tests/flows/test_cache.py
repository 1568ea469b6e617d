"""A stage's result is found again exactly when it is there, intact and ours."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.filesystems import LocalFileSystem
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

from flows.cache import VerifiedJSONSerializer, active_store, stage_key, trusted_result, use_store
from flows.tasks import stage_task
from stages.artifacts import ArtifactStore
from stages.contracts import ArtifactRef, StageContext, StageRequest, StageResult
from stages.errors import ArtifactMissing, StageCrashed, StageFailed
from tests.flows.fakes import FakeSession, context, denoise_request, encode_request

encode = stage_task("encode")
denoise = stage_task("denoise")


@flow(persist_result=False)
def one_stage(request: Any, session: Any, where: Any, fresh: bool = False) -> State[StageResult]:
    chosen = encode.with_options(refresh_cache=True) if fresh else encode
    return chosen(request, session, where, return_state=True)


class Bench:
    """A store, a results folder and a session: the state in which one test runs its flows."""

    def __init__(self, folder: Path) -> None:
        self.store = ArtifactStore(folder / "store")
        self.results = folder / "results"
        self.where: StageContext = context(f"file://{folder / 'store'}", folder)
        self.request = encode_request()
        self.session = FakeSession()

    def run(self, request: StageRequest | None = None, **options: Any) -> str:
        """Run the stage in a flow; the name of the state in which it ended."""
        storage = {PREFECT_RESULTS_LOCAL_STORAGE_PATH: str(self.results)}
        with temporary_settings(storage):
            state = one_stage(request or self.request, self.session, self.where, **options)
        self.result = state.result()
        return str(state.name)

    @property
    def num_runs(self) -> int:
        return len(self.session.ran)

    @property
    def artifact(self) -> Path:
        """The artifact's file; found by name, so that a damaged one is found too."""
        (path,) = (self.where_path / "objects").rglob(self.result.only().digest)
        return path

    @property
    def prefect_record(self) -> Path:
        return self.results / stage_key(self.request)

    @property
    def store_record(self) -> Path:
        (path,) = (self.where_path / "records").rglob(f"{self.request.digest}.json")
        return path

    @property
    def where_path(self) -> Path:
        return Path(self.where.store_url.removeprefix("file://"))


@pytest.fixture
def bench(prefect_server: str, home: Path, tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# ---- hits and misses -----------------------------------------------------------------------


def test_an_equal_request_is_not_run_again_and_shows_as_cached(bench: Bench) -> None:
    assert bench.run() == "Completed"
    first = bench.result
    again = bench.request.model_copy(update={"label": "another label"})
    assert bench.run(again) == "Cached"
    assert bench.result == first
    assert bench.num_runs == 1


def test_another_request_runs(bench: Bench) -> None:
    bench.run()
    assert bench.run(encode_request("a blue fox")) == "Completed"
    assert bench.num_runs == 2


def test_fresh_runs_again(bench: Bench) -> None:
    bench.run()
    assert bench.run(fresh=True) == "Completed"
    assert bench.num_runs == 2


def delete(path: Path) -> None:
    path.chmod(0o600)
    path.unlink()


def truncate(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-5])


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    rewrite(path, bytes(data))


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete, truncate, flip_one_bit])
def test_a_damaged_artifact_is_made_again_and_then_found(
    bench: Bench, damage: Callable[[Path], None]
) -> None:
    bench.run()
    before = bench.artifact.read_bytes()
    damage(bench.artifact)
    assert bench.run() == "Completed"
    assert bench.artifact.read_bytes() == before
    assert bench.run() == "Cached"
    assert bench.num_runs == 2


def empty(path: Path) -> None:
    path.write_bytes(b"")


def without_its_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def with_another_type(path: Path) -> None:
    envelope = json.loads(path.read_bytes())
    envelope["result"] = json.dumps({"__class__": "subprocess.Popen", "data": ["true"]})
    path.write_text(json.dumps(envelope))


def of_another_stage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(rb"\"encode\"", rb"\"decode\""))


@pytest.mark.parametrize("damage", [empty, without_its_end, with_another_type, of_another_stage])
def test_a_damaged_record_is_no_record_and_is_written_anew(
    bench: Bench, damage: Callable[[Path], None]
) -> None:
    bench.run()
    good = bench.prefect_record.read_bytes()
    damage(bench.prefect_record)
    assert bench.prefect_record.read_bytes() != good
    bench.store_record.unlink()
    assert bench.run() == "Completed"
    assert json.loads(bench.prefect_record.read_bytes())["result"] == json.loads(good)["result"]
    assert bench.run() == "Cached"
    assert bench.num_runs == 2


def test_a_result_is_found_by_the_stores_record_when_prefects_is_gone(bench: Bench) -> None:
    bench.run()
    bench.prefect_record.unlink()
    assert bench.run() == "Cached"
    assert bench.num_runs == 1


def test_a_result_is_found_by_prefects_record_which_renews_the_stores(bench: Bench) -> None:
    bench.run()
    first = bench.result
    bench.store_record.unlink()
    assert bench.run() == "Cached"
    assert bench.num_runs == 1
    assert bench.store.lookup(bench.request) == first


def test_moved_folders_are_found_by_relative_keys(bench: Bench, tmp_path: Path) -> None:
    bench.run()
    assert str(tmp_path) not in bench.prefect_record.read_text()
    bench.where_path.rename(tmp_path / "elsewhere")
    bench.results.rename(tmp_path / "results-elsewhere")
    bench.results = tmp_path / "results-elsewhere"
    bench.where = context(f"file://{tmp_path / 'elsewhere'}", tmp_path)
    bench.store_record.unlink()
    assert bench.run() == "Cached"


def test_a_downstream_stage_is_kept_when_its_inputs_are_made_again_equal(
    bench: Bench, tmp_path: Path
) -> None:
    @flow(persist_result=False)
    def two_stages() -> list[str]:
        first = encode(bench.request, bench.session, bench.where, return_state=True)
        then = denoise_request(first.result().only())
        second = denoise(then, bench.session, bench.where, return_state=True)
        return [str(first.name), str(second.name)]

    storage = {PREFECT_RESULTS_LOCAL_STORAGE_PATH: str(bench.results)}
    with temporary_settings(storage):
        assert two_stages() == ["Completed", "Completed"]
        (embeds,) = (bench.where_path / "objects").rglob(
            bench.store.lookup(bench.request).only().digest  # type: ignore[union-attr]
        )
        delete(embeds)
        assert two_stages() == ["Completed", "Cached"]


# ---- nothing read from disk is executed ----------------------------------------------------


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def planted(serializer: dict[str, Any], payload: str) -> str:
    return json.dumps({"metadata": {"serializer": serializer}, "result": payload})


def test_a_planted_pickle_is_never_unpickled(bench: Bench, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    payload = base64.encodebytes(pickle.dumps(Trap(sprung))).decode()
    pickle.loads(base64.decodebytes(payload.encode()))
    assert sprung.exists(), "the trap does not work"
    sprung.unlink()
    bench.prefect_record.parent.mkdir(parents=True)
    bench.prefect_record.write_text(planted({"type": "pickle", "picklelib": "pickle"}, payload))
    assert bench.run() == "Completed"
    assert not sprung.exists()
    assert bench.num_runs == 1
    assert bench.run() == "Cached"


def test_a_stage_inside_of_a_stage_is_guarded_too(bench: Bench, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    payload = base64.encodebytes(pickle.dumps(Trap(sprung))).decode()
    bench.prefect_record.parent.mkdir(parents=True)
    bench.prefect_record.write_text(planted({"type": "pickle", "picklelib": "pickle"}, payload))
    inner = FakeSession()

    def run_inner(number: int) -> None:
        encode(bench.request, inner, bench.where)

    bench.session = FakeSession(run_inner)
    assert bench.run(encode_request("outer")) == "Completed"
    assert not sprung.exists()
    assert len(inner.ran) == 1


@pytest.mark.parametrize(
    "serializer",
    [
        {"type": "pickle"},
        {"type": "compressed/pickle"},
        {"type": "json", "object_decoder": "os.system"},
        {"type": "verified-json", "jsonlib": "antigravity"},
        {},
    ],
    ids=str,
)
def test_a_record_that_names_its_own_reader_is_refused(
    serializer: dict[str, Any], tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    result = StageResult(stage="encode", artifacts={"out": store.put(b"data")})
    payload = VerifiedJSONSerializer().dumps(result).decode()
    ours = planted({"type": "verified-json"}, payload).encode()
    assert trusted_result(ours, "encode/ab", store) == result
    with pytest.raises(ArtifactMissing, match="cannot be trusted"):
        trusted_result(planted(serializer, payload).encode(), "encode/ab", store)


# ---- the serializer ------------------------------------------------------------------------


def test_results_and_errors_survive_the_serializer(tmp_path: Path) -> None:
    serializer = VerifiedJSONSerializer()
    with use_store(f"file://{tmp_path}") as store:
        result = StageResult(stage="encode", artifacts={"out": store.put(b"data")})
        assert serializer.loads(serializer.dumps({"rows": [result, 1, None]})) == {
            "rows": [result, 1, None]
        }
        error = serializer.loads(serializer.dumps(StageCrashed("killed by signal 9")))
    assert type(error) is StageCrashed
    assert str(error) == "killed by signal 9"


def test_a_foreign_error_comes_back_as_a_failed_stage(tmp_path: Path) -> None:
    serializer = VerifiedJSONSerializer()
    with use_store(str(tmp_path)):
        error = serializer.loads(serializer.dumps(KeyError("prompt")))
    assert type(error) is StageFailed
    assert str(error) == "KeyError: 'prompt'"


def test_loading_fails_when_an_artifact_is_gone(tmp_path: Path) -> None:
    blob = VerifiedJSONSerializer().dumps(ArtifactRef(digest="ab" * 32, size=4))
    with use_store(str(tmp_path)), pytest.raises(ArtifactMissing):
        VerifiedJSONSerializer().loads(blob)


@pytest.mark.parametrize(
    "blob",
    [
        b'{"__class__": "subprocess.Popen", "data": {}}',
        b'{"__class__": "stages.contracts.StageRequest", "data": {}}',
        b'{"__exc_type__": "builtins.SystemExit", "message": ""}',
        b"\x80\x04N.",
        b"",
    ],
)
def test_types_that_are_not_ours_are_refused(blob: bytes, tmp_path: Path) -> None:
    with use_store(str(tmp_path)), pytest.raises(ValueError):
        VerifiedJSONSerializer().loads(blob)


def test_an_object_without_a_record_type_cannot_be_a_result() -> None:
    with pytest.raises(TypeError, match="a PosixPath cannot be a stage's result"):
        VerifiedJSONSerializer().dumps(Path("latents"))


def test_the_active_store_is_the_environments_outside_of_a_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert active_store().url == str(home / "store")
    monkeypatch.setenv("EXEUNT_STORE", str(tmp_path / "other"))
    assert active_store().url == str(tmp_path / "other")
    with use_store(f"file://{tmp_path}"):
        assert active_store().url == str(tmp_path)
    assert active_store().url == str(tmp_path / "other")


def test_a_check_counts_for_one_reading_alone(bench: Bench) -> None:
    """What a task run has checked must not vouch for a later reading of the same record."""
    bench.run()
    assert bench.run() == "Cached"
    blob = json.loads(bench.prefect_record.read_bytes())["result"].encode()
    with use_store(bench.where.store_url):
        assert VerifiedJSONSerializer().loads(blob) == bench.result
        delete(bench.artifact)
        with pytest.raises(ArtifactMissing):
            VerifiedJSONSerializer().loads(blob)


# ---- the key -------------------------------------------------------------------------------

KEY_SCRIPT = """
import sys
from flows.cache import stage_key
from stages.contracts import StageRequest

def request():
    options = {"prompt": "a red fox", "guidance_scale": 4.0, "shift": -0.0}
    if "reversed" in sys.argv:
        options = dict(reversed(options.items()))
    return StageRequest(stage="encode", code_version="1", family="z-image", task="text-to-image",
        components={name: "ab" * 32 for name in {"vae", "text_encoder", "transformer"}},
        dtype="bfloat16", options=options, label=str(sys.argv))

if __name__ == "__main__":
    print(stage_key(request()))
"""


def test_the_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "keys.py"
    script.write_text(KEY_SCRIPT)
    imported = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import keys; " + (
        "print(keys.stage_key(keys.request()))"
    )
    keys = []
    for seed, command in [
        ("0", [str(script)]),
        ("1", [str(script), "reversed"]),
        ("2", ["-c", imported]),
    ]:
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}
        env |= {"HOSTNAME": f"host-{seed}", "TMPDIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, check=True
        )
        keys.append(run.stdout.strip())
    assert keys[0].startswith("encode/")
    assert len(keys[0]) == len("encode/") + 64
    assert len(set(keys)) == 1


def test_storage_keeps_prefects_own_reader_out_of_other_stages(tmp_path: Path) -> None:
    """The guard answers for the run's own key; other keys are the inner storage's affair."""
    from flows.cache import StageRecords

    inner = LocalFileSystem(basepath=str(tmp_path))
    inner.write_path("note", b"text", _sync=True)  # type: ignore[call-arg]
    records = StageRecords()
    records._inner = inner
    records._request = encode_request()
    assert records.read_path("note", _sync=True) == b"text"
